//! Who may call, and how they show it.

use std::{collections::HashMap, sync::Arc};

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

/// A merchant, put into the request by the authentication.
#[derive(Clone, Copy)]
pub struct Merchant {
    /// What never changes: whose keys, orders and nonces these are.
    pub id: &'static str,
    /// What its requests are signed with.
    pub secret: &'static [u8],
}

pub const A: Merchant = Merchant {
    id: "m_a",
    secret: b"signing secret of merchant a, for demonstration",
};
pub const B: Merchant = Merchant {
    id: "m_b",
    secret: b"signing secret of merchant b, for demonstration",
};

/// The credentials, by their hash: so looking one up takes no longer for one that is nearly right.
#[derive(Clone)]
pub struct Credentials(Arc<HashMap<[u8; 32], Merchant>>);

impl Credentials {
    pub fn of(credentials: impl IntoIterator<Item = (&'static str, Merchant)>) -> Self {
        let credentials = credentials.into_iter();
        let by_hash = credentials.map(|(token, merchant)| (hash(token), merchant));
        Self(Arc::new(by_hash.collect()))
    }

    /// Two for one merchant: it is about to replace the first.
    pub fn for_demonstration() -> Self {
        Self::of([("merchant-a", A), ("merchant-a-2", A), ("merchant-b", B)])
    }

    /// Whose credential this request has, in `Authorization: Bearer …` (RFC 6750 §2.1).
    pub fn whose(&self, headers: &HeaderMap) -> Option<Merchant> {
        let mut lines = headers.get_all(header::AUTHORIZATION).iter();
        let (line, None) = (lines.next()?, lines.next()) else {
            return None;
        };
        let (scheme, token) = line.to_str().ok()?.split_once(' ')?;
        let is_bearer = scheme.eq_ignore_ascii_case("bearer");
        self.0.get(&hash(token)).filter(|_| is_bearer).copied()
    }
}

fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token).into()
}
