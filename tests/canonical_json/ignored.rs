//! Members that are left out.

use std::panic::catch_unwind;

use tower_idempotency::{CanonicalJson, FingerprintScheme};

use super::{DUPLICATE, JSON, TOO_DEEP, digest, digest_under};

/// Whether two documents are one when these members are left out.
#[track_caller]
fn same_without(pointers: &[&str], a: &str, b: &str) -> bool {
    let scheme = CanonicalJson::new().ignoring(pointers);
    let [a, b] = [a, b].map(|body| digest_under(&scheme, JSON, body));
    assert!(a.is_ok() && b.is_ok());
    a == b
}

#[test]
fn a_member_that_is_left_out_may_differ_or_be_absent() {
    let first = r#"{"amount":1,"requested_at":"12:00"}"#;
    let without = |body| same_without(&["/requested_at"], first, body);
    assert!(without(r#"{"amount":1,"requested_at":"12:01"}"#));
    assert!(without(r#"{"requested_at":{"a":[1,{}]},"amount":1}"#));
    assert!(without(r#"{"amount":1}"#));
    assert!(without(r#"{"amount":1,"requested\u005fat":0}"#));
    assert!(!without(r#"{"amount":2,"requested_at":"12:00"}"#));
    assert!(!without(r#"{"amount":1,"requested_at":"12:00","note":1}"#));
    assert!(!without(r#"{"amount":1,"Requested_at":"12:00"}"#));
    // Only where the pointer leads.
    assert!(!without(r#"{"amount":1,"client":{"requested_at":1}}"#));
    assert!(!without(r#"[{"amount":1,"requested_at":"12:00"}]"#));
    assert!(same_without(&["/a"], r#"{"a":1}"#, "{}"));
    assert!(!same_without(&["/a"], r#"{"a":1}"#, "[]"));
    // What is left is equal to the document that never had more.
    let scheme = CanonicalJson::new().ignoring(["/requested_at"]);
    assert_eq!(
        digest_under(&scheme, JSON, first),
        digest(r#"{"amount":1}"#)
    );
}

#[test]
fn a_pointer_leads_through_objects_and_through_arrays_by_number() {
    let ip = ["/client/ip"];
    assert!(same_without(
        &ip,
        r#"{"client":{"ip":1,"id":2},"a":3}"#,
        r#"{"a":3,"client":{"id":2}}"#
    ));
    assert!(!same_without(
        &ip,
        r#"{"client":{"ip":1,"id":2}}"#,
        r#"{"client":{"ip":1,"id":3}}"#
    ));
    assert!(!same_without(
        &ip,
        r#"{"client":{"x":{"ip":1}}}"#,
        r#"{"client":{"x":{"ip":2}}}"#
    ));
    assert!(!same_without(
        &ip,
        r#"{"client":["ip",1]}"#,
        r#"{"client":["ip",2]}"#
    ));
    assert!(!same_without(
        &ip,
        r#"{"client":"ip"}"#,
        r#"{"client":"pi"}"#
    ));

    let second = ["/items/1/at"];
    let items = |zero, one, two| {
        format!(r#"{{"items":[{{"at":{zero}}},[],{{"at":0}}],"items2":1}}"#)
            .replace("[]", &format!(r#"{{"at":{one},"n":{two}}}"#))
    };
    assert!(same_without(&second, &items(1, 2, 3), &items(1, 9, 3)));
    assert!(!same_without(&second, &items(1, 2, 3), &items(9, 2, 3)));
    assert!(!same_without(&second, &items(1, 2, 3), &items(1, 2, 9)));
    // An array in an array, and the tenth element.
    let deep = ["/1/0/x", "/10/x"];
    assert!(same_without(&deep, r#"[0,[{"x":1}]]"#, r#"[0,[{"x":2}]]"#));
    assert!(!same_without(
        &deep,
        r#"[0,[0,{"x":1}]]"#,
        r#"[0,[0,{"x":2}]]"#
    ));
    let eleventh = |x| format!(r#"[{}{{"x":{x}}}]"#, r#"{"x":0},[[]],"#.repeat(5));
    assert!(same_without(&deep, &eleventh(1), &eleventh(2)));
    // A number may be a name as well.
    assert!(same_without(&["/1"], r#"{"1":1}"#, r#"{"1":2}"#));
}

#[test]
fn elements_of_arrays_are_never_left_out() {
    for pointer in ["/0", "/items/0", "/items/-", "/items/00/x", "/items/+0/x"] {
        assert!(!same_without(&[pointer], "[1,2]", "[3,2]"), "{pointer}");
        let (a, b) = (r#"{"items":[{"x":1}]}"#, r#"{"items":[{"x":2}]}"#);
        assert!(!same_without(&[pointer], a, b), "{pointer}");
    }
}

#[test]
fn slashes_and_tildes_in_names_are_written_with_tildes() {
    assert!(same_without(&["/a~1b"], r#"{"a/b":1}"#, r#"{"a\/b":2}"#));
    assert!(same_without(&["/a~0b"], r#"{"a~b":1}"#, r#"{"a~b":2}"#));
    assert!(same_without(&["/~01"], r#"{"~1":1}"#, r#"{"~1":2}"#));
    assert!(!same_without(&["/~01"], r#"{"/":1}"#, r#"{"/":2}"#));
    assert!(same_without(&["/~1~0~1"], r#"{"/~/":1}"#, r#"{"/~/":2}"#));
    assert!(same_without(&["/"], r#"{"":1}"#, r#"{"":2}"#));
    assert!(same_without(
        &["/a//b"],
        r#"{"a":{"":{"b":1}}}"#,
        r#"{"a":{"":{"b":2}}}"#
    ));
    // Everything else is itself, however the document spells it.
    assert!(same_without(
        &["/é\"\\\n"],
        r#"{"é\"\\\n":1}"#,
        r#"{"\u00e9\u0022\u005c\u000a":2}"#
    ));
    assert!(same_without(&["/%7e"], r#"{"%7e":1}"#, r#"{"%7e":2}"#));
    assert!(!same_without(&["/%7e"], r#"{"~":1}"#, r#"{"~":2}"#));
}

#[test]
fn pointers_do_not_get_in_each_others_way() {
    let both = ["/a/b", "/a"];
    assert!(same_without(
        &both,
        r#"{"a":{"b":1,"c":2},"d":3}"#,
        r#"{"d":3,"a":4}"#
    ));
    let beside = ["/a/b/c", "/a/x", "/d"];
    let body = |b, y, d| format!(r#"{{"d":{d},"a":{{"x":[1],"b":{{"z":0,"c":{b}}},"y":{y}}}}}"#);
    assert!(same_without(&beside, &body(1, 2, 3), &body(4, 2, 5)));
    assert!(!same_without(&beside, &body(1, 2, 3), &body(1, 3, 3)));
    let (a, b) = (
        CanonicalJson::new(),
        CanonicalJson::new().ignoring(["/x", "/y"]),
    );
    let added = a.ignoring(["/x"]).ignoring(["/y"]);
    assert_eq!(added.name(), b.name());
    let body = r#"{"y":1,"z":2,"x":3}"#;
    assert_eq!(
        digest_under(&added, JSON, body),
        digest_under(&b, JSON, body)
    );
}

/// Objects of all sizes go other ways inside, and so they do with members left out.
#[test]
fn members_are_left_out_of_objects_of_any_size() {
    for count in [1, 5, 12, 13, 40, 600] {
        let members = |at: usize, skip: bool| -> Vec<_> {
            (0..count)
                .filter(|n| !(skip && n % 5 == 0))
                .map(|n| {
                    format!(
                        "\"m{:03}\":{{\"b\":{n},\"a\":[{}]}}",
                        (n * 7) % 600,
                        if n % 5 == 0 { at } else { 0 }
                    )
                })
                .collect()
        };
        let pointers: Vec<_> = (0..count)
            .step_by(5)
            .map(|n| format!("/in/m{:03}", (n * 7) % 600))
            .collect();
        let scheme = CanonicalJson::new().ignoring(&pointers);
        let body =
            |members: Vec<String>| format!("{{\"in\":{{{}}},\"beside\":1}}", members.join(", "));
        let found = digest_under(&scheme, JSON, body(members(1, false)));
        assert_eq!(
            found,
            digest_under(&scheme, JSON, body(members(2, false))),
            "{count}"
        );
        assert_eq!(found, digest(body(members(1, true))), "{count}");
        assert_ne!(found, digest(body(members(1, false))), "{count}");
    }
}

#[test]
fn what_is_left_out_is_still_checked() {
    let scheme = CanonicalJson::new().ignoring(["/a"]);
    for body in [
        r#"{"a":1,"a":2}"#,
        r#"{"a":{"b":1,"b":2},"c":3}"#,
        r#"{"a":[{"":1,"":2}]}"#,
    ] {
        assert_eq!(digest_under(&scheme, JSON, body), Err(DUPLICATE), "{body}");
    }
    let deep = format!("{{\"a\":{}}}", "[".repeat(128));
    assert_eq!(digest_under(&scheme, JSON, &deep), Err(TOO_DEEP));
    let (broken, other) = (r#"{"a":01}"#, r#"{"a":02}"#);
    assert_ne!(
        digest_under(&scheme, JSON, broken),
        digest_under(&scheme, JSON, other)
    );
    // Where nothing is read as JSON there are no members.
    let plain = [("content-type", "text/plain")];
    let under = |body| digest_under(&scheme, &plain, body);
    assert_ne!(under(r#"{"a":1}"#), under(r#"{"a":2}"#));
}

#[test]
fn the_list_makes_the_name() {
    let name = |pointers: &[&str]| CanonicalJson::new().ignoring(pointers).name().into_owned();
    assert_eq!(name(&[]), "json-v1");
    assert_eq!(CanonicalJson::default().name(), "json-v1");
    let listed = name(&["/a", "/b"]);
    assert!(
        listed.len() == 24 && listed.starts_with("json-v1-"),
        "{listed}"
    );
    assert!(
        listed[8..]
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    );
    assert_eq!(listed, name(&["/b", "/a"]));
    assert_eq!(listed, name(&["/a", "/b", "/a"]));
    for other in [
        &["/a"][..],
        &["/b"],
        &["/a/b"],
        &["/a", "/b", "/c"],
        &["/a~1b"],
        &["/a/", "/b"],
    ] {
        assert_ne!(listed, name(other), "{other:?}");
    }
}

#[test]
fn what_is_no_pointer_panics_when_the_scheme_is_made_and_says_why() {
    let said = |pointer: &'static str| {
        let made = catch_unwind(|| CanonicalJson::new().ignoring(["/fine", pointer]));
        *made.expect_err(pointer).downcast::<String>().unwrap()
    };
    for pointer in ["", "requested_at", "#/a", "$.a", " /a"] {
        let message = said(pointer);
        assert!(message.starts_with("ignoring: "), "{message}");
        assert!(message.contains(&format!("{pointer:?}")), "{message}");
        assert!(message.contains("begins with a slash"), "{message}");
    }
    for pointer in ["/~", "/a~", "/a~2", "/~~0", "/a~/b", "/~é"] {
        let message = said(pointer);
        assert!(message.contains(&format!("{pointer:?}")), "{message}");
        assert!(
            message.contains("\"~0\"") && message.contains("\"~1\""),
            "{message}"
        );
    }
}
