//! Deep, wide and large documents.

use std::collections::HashSet;

use super::{DUPLICATE, TOO_DEEP, digest, reference};

fn nested(depth: usize, open: &str, close: &str) -> String {
    format!("{}1{}", open.repeat(depth), close.repeat(depth))
}

#[test]
fn a_document_may_be_128_deep_and_no_deeper() {
    let kinds = [
        ("[", "]"),
        ("{\"a\":", "}"),
        ("{\"b\":0,\"a\":", "}"),
        ("[0,", ",0]"),
        (" [ {\"a\" : ", "} ] "),
    ];
    for (open, close) in kinds {
        let levels = 1 + usize::from(open.contains(" [ {"));
        let fits = nested(128 / levels, open, close);
        assert!(digest(&fits).is_ok(), "{open}");
        assert_eq!(digest(&fits), reference::digest(fits.as_bytes()), "{open}");
        for deeper in [128 / levels + 1, 5_000, 100_000] {
            assert_eq!(digest(nested(deeper, open, close)), Err(TOO_DEEP), "{open}");
        }
        // Whether it ends or not: what is met first counts.
        assert_eq!(digest(open.repeat(129)), Err(TOO_DEEP), "{open}");
        assert_ne!(digest(open.repeat(128 / levels)), Err(TOO_DEEP), "{open}");
    }
    // What has ended is deep no more.
    let wide = format!("[{}]", vec![nested(127, "[", "]"); 50].join(","));
    assert_eq!(digest(&wide), reference::digest(wide.as_bytes()));
    // A hundred brackets in a string are a string.
    let brackets = format!("[\"{}\"]", "[{".repeat(200));
    assert_eq!(digest(&brackets), reference::digest(brackets.as_bytes()));
}

#[test]
fn a_deep_document_needs_little_stack() {
    let deep = nested(128, "{\"b\":[0],\"a\":", ",\"0\":{\"y\":1,\"x\":2}}");
    let expected = reference::digest(deep.as_bytes());
    let small = std::thread::Builder::new().stack_size(128 * 1024);
    let found = small.spawn(move || digest(deep)).unwrap().join().unwrap();
    assert_eq!(found, expected);
}

/// Names of every make, in objects of every size around the places where sorting goes another way.
#[test]
fn members_find_their_order_however_many_they_are_and_whatever_their_names() {
    let long = "common_prefix_of_all_of_these_names/".repeat(4);
    type Name = Box<dyn Fn(usize) -> String>;
    let names: [(&str, Name); 9] = [
        ("counted", Box::new(|n| format!("k{n}"))),
        ("padded", Box::new(|n| format!("member_{n:07}"))),
        (
            "hexadecimal",
            Box::new(|n| format!("{:016x}", n.wrapping_mul(0x9E37_79B9_7F4A_7C15))),
        ),
        ("long", Box::new(move |n| format!("{long}{n:05}"))),
        (
            "one that is not long",
            Box::new(|n| match n {
                0 => "z".to_owned(),
                _ => format!("the_common_prefix_of_the_others_{n}"),
            }),
        ),
        ("each longer than the last", Box::new(|n| "a".repeat(n))),
        (
            "groups of eight",
            Box::new(|n| format!("{:08}{:08}", n / 40, n)),
        ),
        (
            "not ASCII",
            Box::new(|n| format!("é{}\u{10FFFF}{n}", ["ä", "z", "\u{7f}"][n % 3])),
        ),
        (
            "escaped",
            Box::new(|n| format!("\\u00{:02x}{n}\\n", n % 0x20)),
        ),
    ];
    for (kind, name) in &names {
        for count in [
            0, 1, 2, 3, 7, 8, 9, 11, 12, 13, 14, 40, 511, 512, 513, 2_000,
        ] {
            let mut members: Vec<_> = (0..count).map(|n| format!("\"{}\":{n}", name(n))).collect();
            let sorted = format!("{{{}}}", members.join(","));
            let expected = reference::digest(sorted.as_bytes());
            assert_eq!(digest(&sorted), expected, "{count} {kind}");
            members.reverse();
            let reversed = format!("{{{}}}", members.join(" ,"));
            assert_eq!(digest(&reversed), expected, "{count} {kind}, reversed");
            // Every 7th first, and so on.
            let mixed = (0..7).flat_map(|from| members.iter().skip(from).step_by(7).cloned());
            let mixed = format!("[{{{}}}]", mixed.collect::<Vec<_>>().join(","));
            let expected = reference::digest(mixed.as_bytes());
            assert_eq!(digest(&mixed), expected, "{count} {kind}, mixed");
        }
    }
}

#[test]
fn a_document_of_a_mebibyte_is_read_to_its_last_byte() {
    let element = r#"{"id":7,"amount":250,"currency":"THB","é":[1,2,{"b":1,"a":2}]}"#;
    let count = (1 << 20) / (element.len() + 1) - 1;
    let with_last = |last: &str| format!("[{},{last}]", vec![element; count].join(","));
    let bodies = [
        with_last("1"),
        with_last("2"),
        with_last("01"),
        with_last("{\"a\":1,\"a\":2}"),
    ];
    let found = bodies.each_ref().map(digest);
    for (body, found) in bodies.iter().zip(&found) {
        assert_eq!(*found, reference::digest(body.as_bytes()));
    }
    assert_eq!(found[3], Err(DUPLICATE));
    let distinct: HashSet<_> = found.into_iter().flatten().collect();
    assert_eq!(distinct.len(), 3);
}
