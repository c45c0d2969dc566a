//! Live records hold these names and digests. Once released, none of them may ever change: a rule
//! that must change gets a new name.

use tower_idempotency::{CanonicalJson, Fingerprint, FingerprintScheme};

use super::{JSON, digest, digest_under};

fn hex(found: Fingerprint) -> String {
    let digits = found.as_bytes().iter().map(|byte| format!("{byte:02x}"));
    digits.collect()
}

#[test]
fn the_digests_are_what_they_were_when_the_name_was_given() {
    let pinned = [
        (
            "{}",
            "50f470d90b336f2e023c08631e46d7885d0f6d06042729ea6c6f54d9aee7a586",
        ),
        (
            r#"{"b":[1,-0.50,"\u00e9\/\n"],"a":{"\uD800":null,"":true}}"#,
            "667ad6f15d32fc46505378139262226e5f2b2b6d0a3752ea3df4f78e52722b64",
        ),
        (
            r#" "text" "#,
            "4fce9991bee77ef8ee67e4aae57243ee3195ddc6bdebd04fe2856494a1c91e77",
        ),
        (
            "not JSON",
            "cc3833b6fb10efb981d08c925fd29ef183a2d07f3c308f205cb17d63590f5f66",
        ),
        (
            "",
            "abcfc32d13f2bc2589db79b1de4e9ec60f10158595c4fe1810e5306a7eb0c400",
        ),
    ];
    for (body, expected) in pinned {
        assert_eq!(hex(digest(body).unwrap()), expected, "{body}");
    }
    let scheme = CanonicalJson::new().ignoring(["/requested_at", "/client/ip"]);
    assert_eq!(scheme.name(), "json-v1-379e9c24f3cde73b");
    let body = r#"{"requested_at":1,"client":{"ip":2,"id":3}}"#;
    let found = digest_under(&scheme, JSON, body).unwrap();
    assert_eq!(
        hex(found),
        "1827a5cf5bead07a12d8306d9c55985354a8075417c6437a8a1143330f9f727d"
    );
}

#[test]
fn the_digest_is_that_of_the_documented_text() {
    let text = r#"{"":true,"a":{"\ud800":null},"b":[1,-0.50,"é/\n"]}"#;
    let expected = super::reference::framed("json", text.as_bytes());
    let body = "{\"b\":[1, -0.50,\"\\u00e9\\/\\u000a\"], \"a\":{\"\\uD800\":null},\"\":true}";
    assert_eq!(digest(body), Ok(expected));
    let raw = super::reference::framed("raw", b"{");
    assert_eq!(digest("{"), Ok(raw));
}
