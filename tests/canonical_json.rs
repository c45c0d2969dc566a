//! Under `CanonicalJson` a JSON body is what it says, whatever way it is written, and what is no
//! JSON is its bytes.

mod support;

#[path = "canonical_json/depth_and_size.rs"]
mod depth_and_size;
#[path = "canonical_json/generated.rs"]
mod generated;
#[path = "canonical_json/ignored.rs"]
mod ignored;
#[path = "canonical_json/layer.rs"]
mod layer;
#[path = "canonical_json/pinned.rs"]
mod pinned;
#[path = "canonical_json/reference.rs"]
mod reference;
#[path = "canonical_json/spelling.rs"]
mod spelling;

use bytes::Bytes;
use http::Request;
use tower_idempotency::{CanonicalJson, Fingerprint, FingerprintScheme, UndecodableBody};

const DUPLICATE: UndecodableBody =
    UndecodableBody("an object has two members of one name; send each name once");
const TOO_DEEP: UndecodableBody =
    UndecodableBody("arrays and objects stand in each other more than 128 deep; nest them less");

/// The digest of a POST to `/charges` with this body.
fn digest_under(
    scheme: &CanonicalJson,
    headers: &[(&str, &str)],
    body: impl AsRef<[u8]>,
) -> Result<Fingerprint, UndecodableBody> {
    let mut request = Request::post("/charges");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let (head, ()) = request.body(()).unwrap().into_parts();
    scheme.fingerprint(&head, &Bytes::copy_from_slice(body.as_ref()))
}

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

fn digest(body: impl AsRef<[u8]>) -> Result<Fingerprint, UndecodableBody> {
    digest_under(&CanonicalJson::new(), JSON, body)
}

#[track_caller]
fn assert_same(bodies: &[&str]) {
    for body in bodies {
        let found = digest(body);
        assert!(found.is_ok(), "{body}: {found:?}");
        assert_eq!(found, digest(bodies[0]), "{body} and {}", bodies[0]);
        assert_eq!(found, reference::digest(body.as_bytes()), "{body}");
    }
}

#[track_caller]
fn assert_distinct(bodies: &[impl AsRef<[u8]>]) {
    let mut seen = std::collections::HashMap::new();
    for body in bodies {
        let text = String::from_utf8_lossy(body.as_ref()).into_owned();
        let found = digest(body);
        assert_eq!(found, reference::digest(body.as_ref()), "{text}");
        if let Some(same) = seen.insert(found.expect(&text), text.clone()) {
            panic!("{text} and {same} are one");
        }
    }
}
