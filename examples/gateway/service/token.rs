//! The secret that lets its bearer upload a slip.

use sha2::{Digest, Sha256};

/// 256 random bits. The gateway itself keeps only their hash: whoever reads its tables cannot upload. That they
/// are in the answer is why the layer's records are sealed.
pub struct UploadToken(String);

impl UploadToken {
    pub fn random() -> Self {
        let random = rand::random::<[u128; 2]>();
        Self(format!("upl_{:032x}{:032x}", random[0], random[1]))
    }

    pub fn reveal(&self) -> &str {
        &self.0
    }

    pub fn hash(&self) -> [u8; 32] {
        hash(self.0.as_bytes())
    }
}

/// A token is compared by its hash, and how long that takes says nothing about the token.
pub fn hash(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}
