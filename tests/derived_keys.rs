//! Keys made of content and intent: the same ones as elsewhere, and none that two intents share.
//!
//! The expected keys were worked out with Node's `crypto` and Python's `hashlib`.

use std::collections::HashSet;

use proptest::prelude::*;
use tower_idempotency::{
    Fingerprint, IdempotencyKey, KeyFormat,
    client::{InvalidKeyParts, derived_key, joined_key, joined_key_with},
};

const INVOICE: [&str; 4] = ["INV-2024-0117", "25000", "acct_42", "deposit"];
const THAI: [&str; 4] = ["ใบแจ้งหนี้-๗", "1", "ร้านกาแฟ ☕", "ฝากเงิน"];
/// Blanks, an empty part, and letters in upper case: all as they are.
const UNTIDY: [&str; 4] = ["  INV ", "25000", "", "Deposit"];

#[track_caller]
fn is(key: Result<IdempotencyKey, InvalidKeyParts>, expected: &str) {
    assert_eq!(key.unwrap().as_str(), Some(expected));
}

#[test]
fn a_joined_key_is_the_one_that_javascript_and_php_make() {
    is(
        joined_key("dep-", INVOICE),
        "dep-5b1e5f8c3307892c6e2cf3a2336b4b95",
    );
    is(joined_key("", INVOICE), "5b1e5f8c3307892c6e2cf3a2336b4b95");
    is(
        joined_key("dep-", THAI),
        "dep-6a735d5721268c86ca1e7a875e8a614d",
    );
    is(
        joined_key("dep-", UNTIDY),
        "dep-8c520ca54c777c5d439fd2b6623de88e",
    );
    is(joined_key("x", ["a"]), "xca978112ca1bbdcafac231b39a23dc4d");
    is(
        joined_key_with(':', "dep-", INVOICE),
        "dep-3f5456e8bd5244d182ea4b28503c8b46",
    );
    // Three bytes in UTF-8.
    is(
        joined_key_with('→', "dep-", INVOICE),
        "dep-b605869700505e1921a6179fc82c3c83",
    );
}

#[test]
fn a_derived_key_is_the_digest_that_its_documentation_tells_how_to_compute() {
    is(
        derived_key("dep-", INVOICE),
        "dep-20e99224ee9392386ffac4a2a40043202673a9295dd5a6ec0dbbe6d81272bd56",
    );
    is(
        derived_key("", INVOICE),
        "20e99224ee9392386ffac4a2a40043202673a9295dd5a6ec0dbbe6d81272bd56",
    );
    is(
        derived_key("dep-", THAI),
        "dep-d51c97fc6c99015392e057936a620185d859134fa7481e80365b4e803edfe758",
    );
    is(
        derived_key("dep-", UNTIDY),
        "dep-79f3b983065659229cd7e65bfc369ab31bd70d948275d31f181163a5c040e201",
    );
    is(
        derived_key("x", ["a"]),
        "x3b196fd4907bedf51c3090e9835f2f7cb61e7ee1b2299ea3b8fed9b4183a822a",
    );
    is(
        derived_key("", [b"\x00\xff|".as_slice(), b""]),
        "7edc9d12ecb372d30a50cf95576f70c2e213a062791f59db495aadf2c524d7da",
    );
}

#[test]
fn lengths_keep_parts_apart_that_would_run_together() {
    is(
        derived_key("", ["ab", "c"]),
        "601d5476e2ccfe2c87a2bba7a322659734a05749d5b5aa781f513e4912db0d5f",
    );
    is(
        derived_key("", ["a", "bc"]),
        "3fafa1cf2f19a7c1129beb20cf0983f73a489a221fc0dd2f16d1be292d089205",
    );
    let lists: [&[&str]; 6] = [
        &["abc"],
        &["ab", "c"],
        &["a", "bc"],
        &["a", "b", "c"],
        &["abc", ""],
        &["", "abc"],
    ];
    let derived: HashSet<_> = lists.map(|parts| derived_key("", parts).unwrap()).into();
    assert_eq!(derived.len(), lists.len());
    // A part with the separator in it is no ambiguity here.
    assert_ne!(derived_key("", ["a|b", "c"]), derived_key("", ["a", "b|c"]));
}

#[test]
fn parts_with_the_separator_in_them_make_no_joined_key() {
    for parts in [["a|b", "c"], ["a", "b|c"], ["|", "c"], ["a", "|"]] {
        assert_eq!(joined_key("", parts), Err(InvalidKeyParts::Separator));
        assert!(joined_key_with(':', "", parts).is_ok());
    }
    let arrow = joined_key_with('→', "", ["a→b", "c"]);
    assert_eq!(arrow, Err(InvalidKeyParts::Separator));
    assert!(joined_key("", ["a→b", "c"]).is_ok());
}

#[test]
fn nothing_makes_no_key() {
    let none: [&str; 0] = [];
    for parts in [&none[..], &[""], &["", "", "", ""]] {
        assert_eq!(derived_key("dep-", parts), Err(InvalidKeyParts::Empty));
        assert_eq!(joined_key("dep-", parts), Err(InvalidKeyParts::Empty));
    }
    assert!(derived_key("dep-", ["", "a"]).is_ok() && joined_key("dep-", ["", "a"]).is_ok());
}

#[test]
fn a_prefix_is_what_a_bare_key_may_begin_with() {
    let longest = "p".repeat(190);
    let taken = ["", "a", "order:7/", "!#$%&()*+-./:<=>?@[]^_`{|}~", &longest];
    for prefix in taken {
        for key in [derived_key(prefix, ["a"]), joined_key(prefix, ["a"])] {
            let key = key.unwrap();
            // A server reads it back as it was sent.
            let read = KeyFormat::any().parse(key.as_bytes()).unwrap();
            assert_eq!(read, key);
            assert!(key.as_str().unwrap().starts_with(prefix));
        }
    }
    let too_long = "p".repeat(191);
    let refused = [
        " ", " a", "a b", "\ta", "a\n", "\"", "a\"", "'", "a,", "a;", "\\", "é", "\u{7f}", "\0",
        &too_long,
    ];
    for prefix in refused {
        for key in [derived_key(prefix, ["a"]), joined_key(prefix, ["a"])] {
            assert_eq!(key, Err(InvalidKeyParts::Prefix), "{prefix:?}");
        }
    }
}

#[test]
fn errors_say_what_is_wrong_and_show_nothing() {
    let said = |error: InvalidKeyParts| format!("{error} {error:?}");
    let secret = joined_key("s3cret-", ["s3cret|", "s3cret"]).unwrap_err();
    assert!(!said(secret).contains("s3cret"));
    assert!(said(InvalidKeyParts::Prefix).contains("190 bytes"));
    assert!(said(InvalidKeyParts::Empty).contains("at least one part"));
    assert!(said(InvalidKeyParts::Separator).contains("separator"));
}

proptest! {
    #[test]
    fn other_parts_make_another_key(
        one in prop::collection::vec("[ab|]{0,3}", 1..4),
        other in prop::collection::vec("[ab|]{0,3}", 1..4),
    ) {
        let derived = (derived_key("", &one), derived_key("", &other));
        if let (Ok(first), Ok(second)) = derived {
            prop_assert_eq!(first == second, one == other);
        }
        let joined = (joined_key("", &one), joined_key("", &other));
        if let (Ok(first), Ok(second)) = joined {
            prop_assert_eq!(first == second, one == other);
        }
    }

    #[test]
    fn a_derived_key_shows_the_fingerprint_of_its_parts(
        parts in prop::collection::vec(".{1,8}", 1..5),
    ) {
        let digest = *Fingerprint::of(&parts).as_bytes();
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let key = derived_key("p-", &parts).unwrap();
        prop_assert_eq!(key.as_str(), Some(&*format!("p-{hex}")));
    }
}
