//! The keys that we send, for the keys that we are sent.

use sha2::{Digest, Sha256};

/// The key under which a step of an action asks somebody else: 64 characters out of `0-9a-f`.
///
/// The client's key must not be handed on bare. At the provider all of our clients share one namespace,
/// ours: two of them may well choose the same key, and the second would get the first one's charge. It
/// may be longer than the provider allows, and is not ours to show. And an action with two calls needs two
/// keys.
///
/// It must be the same whenever the action is run again, in whatever process and after whatever deploy, or
/// the provider takes the second call for a second charge. So it is made only of what names the action,
/// and this function changes only together with the name of the scheme, once no old action is open.
pub fn key(scope: &[u8], key: &[u8], step: &str) -> String {
    let mut digest = Sha256::new();
    // With their lengths, since `ab` + `c` and `a` + `bc` are two clients' keys.
    for part in [b"two_step_charge-1", scope, key, step.as_bytes()] {
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    let digest = digest.finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
