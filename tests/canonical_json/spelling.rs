//! What counts of a document and what does not.

use super::{DUPLICATE, JSON, assert_distinct, assert_same, digest, digest_under};
use tower_idempotency::CanonicalJson;

// F4
#[test]
fn neither_the_order_of_members_nor_white_space_counts() {
    assert_same(&[
        r#"{"a":1,"b":2}"#,
        r#"{"b":2,"a":1}"#,
        r#"{ "a" : 1 , "b" : 2 }"#,
        "\r\n\t{\"b\"\n:\t2,\r\"a\":1 \n} \t",
    ]);
    assert_same(&[
        r#"{"x":{"b":[{"d":1,"c":2}],"a":{}},"":0,"aa":[]}"#,
        r#"{"aa":[ ],"":0,"x":{"a":{ },"b":[{"c":2,"d":1}]}}"#,
        r#"{"":0,"x":{"a":{},"b":[ {"d":1 ,"c":2} ]},"aa":[]}"#,
    ]);
}

// F4
#[test]
fn the_order_of_elements_and_the_place_of_everything_count() {
    assert_distinct(&[
        r#"[1,2]"#,
        r#"[2,1]"#,
        r#"[[1],2]"#,
        r#"[[1,2]]"#,
        r#"[1,[2]]"#,
        r#"[12]"#,
        r#"{"a":{"b":1}}"#,
        r#"{"a":{},"b":1}"#,
        r#"{"b":{"a":1}}"#,
        r#"{"a":[{"b":1}]}"#,
        r#"{"a":[{},{"b":1}]}"#,
        r#"{"a":"b"}"#,
        r#"{"b":"a"}"#,
        r#"{"a":"b\",\"c\":\"d"}"#,
        r#"{"a":"b","c":"d"}"#,
        r#"{"a":1,"b":2}"#,
        r#"{"a":2,"b":1}"#,
        r#"["a","b"]"#,
        r#"["a,b"]"#,
        r#"["a\",\"b"]"#,
        r#"["ab"]"#,
    ]);
}

#[test]
fn numbers_count_as_they_are_written() {
    assert_distinct(&[
        "0",
        "-0",
        "0.0",
        "-0.0",
        "0e0",
        "1",
        "1.0",
        "1.00",
        "1e0",
        "1E0",
        "1e+0",
        "1e-0",
        "10",
        "1e1",
        "0.1",
        "0.10",
        "100",
        "1e2",
        "9007199254740992",
        "9007199254740993",
        "9007199254740993.0",
        "1e400",
        "2e400",
        "123456789012345678901234567890",
        "123456789012345678901234567891",
        "0.1000000000000000055511151231257827",
        "0.1000000000000000055511151231257828",
        "-1",
        "[1]",
        "\"1\"",
    ]);
}

#[test]
fn what_is_no_number_of_json_is_no_json() {
    let words = [
        "01",
        "-",
        "+1",
        "1.",
        ".1",
        "1e",
        "1e+",
        "1.e1",
        "-01",
        "00",
        "0x1",
        "1_000",
        "NaN",
        "Infinity",
        "-Infinity",
        "1,",
        "--1",
        "1..2",
        "1e1.5",
        "١",
    ];
    for word in words {
        let spaced = format!("{word} ");
        assert_ne!(digest(word), digest(&spaced), "{word} was read");
    }
    assert_distinct(&words);
}

#[test]
fn kinds_of_values_never_meet() {
    assert_distinct(&[
        "null",
        "true",
        "false",
        "\"null\"",
        "\"true\"",
        "\"false\"",
        "0",
        "\"0\"",
        "[]",
        "{}",
        "\"\"",
        "[null]",
        "[[]]",
        "[{}]",
        "{\"\":null}",
        "{\"\":\"\"}",
        "\"[]\"",
        "\"{}\"",
        "{\"a\":null}",
    ]);
}

#[test]
fn how_a_string_is_spelled_does_not_count() {
    assert_same(&[r#""é""#, r#""\u00e9""#, r#""\u00E9""#]);
    assert_same(&[r#""😀""#, r#""\ud83d\ude00""#, r#""\uD83D\uDE00""#]);
    assert_same(&[r#""/""#, r#""\/""#, r#""\u002f""#]);
    assert_same(&[r#""a\"b""#, r#""a\u0022b""#]);
    assert_same(&[r#""\\""#, r#""\u005c""#, r#""\u005C""#]);
    assert_same(&[r#""\b\f\n\r\t""#, r#""\u0008\u000c\u000a\u000D\u0009""#]);
    assert_same(&[r#""\u0000\u001f""#, r#""\u0000\u001F""#]);
    assert_same(&["\"\u{7f}\"", r#""\u007f""#]);
    assert_same(&["\"\u{2028}\u{ffff}\"", r#""\u2028\uffff""#]);
    assert_same(&[r#""plain""#, r#""\u0070lain""#, r#""plai\u006e""#]);
    // In names too, and the order is that of what they say.
    assert_same(&[
        r#"{"é":1,"z":2,"/":3,"😀":4}"#,
        r#"{"\ud83d\ude00":4,"\/":3,"\u007a":2,"\u00e9":1}"#,
    ]);
}

#[test]
fn strings_that_say_something_else_differ() {
    assert_distinct(&[
        r#""é""#,
        "\"e\u{301}\"",
        r#""e""#,
        r#""\\u00e9""#,
        r#""\\\u00e9""#,
        r#""\n""#,
        r#""\\n""#,
        r#""\\\n""#,
        r#""n""#,
        r#""\u0000""#,
        r#""""#,
        r#""\u0000\u0000""#,
        r#"" ""#,
        r#""A""#,
        r#""a""#,
        r#""a ""#,
    ]);
}

#[test]
fn a_lone_surrogate_is_equal_to_itself_and_to_nothing_else() {
    assert_same(&[r#""\ud800""#, r#""\uD800""#]);
    assert_same(&[r#"{"\uDEAD":1,"a":2}"#, r#"{"a":2,"\udead":1}"#]);
    assert_distinct(&[
        r#""\ud800""#,
        r#""\ud801""#,
        r#""\udc00""#,
        r#""\udc00\ud800""#,
        r#""\ud800\udc00""#,
        r#""\ud800\ud800""#,
        r#""\ud800\ud800\udc00""#,
        r#""\ud800 \udc00""#,
        r#""\ud800\n\udc00""#,
        r#""\\ud800""#,
        r#""\\\ud800""#,
        "\"\u{fffd}\"",
        r#""\u0000""#,
        r#""?""#,
        r#""ud800""#,
    ]);
    // A half is no half of a pair that is written in another way.
    assert_same(&[r#""\ud800x""#, r#""\uD800\u0078""#]);
}

#[test]
fn two_members_of_one_name_are_refused_wherever_they_are() {
    let many: Vec<_> = (0..3000).map(|n| format!("\"n{}\":0", n % 2999)).collect();
    let long = "x".repeat(100);
    let long: Vec<_> = (0..60).map(|n| format!("\"{long}{}\":0", n % 59)).collect();
    for body in [
        r#"{"a":1,"a":1}"#,
        r#"{"a":1,"b":2,"a":1}"#,
        r#"{"b":1,"a":2,"b":1}"#,
        r#"{"":1,"":2}"#,
        r#"{"a":1,"\u0061":2}"#,
        r#"{"\ud83d\ude00":1,"😀":2}"#,
        r#"{"\ud800":1,"\uD800":2}"#,
        r#"[0,{"x":{"y":[{"a":1,"a":1}]}}]"#,
        r#"{"a":1,"a":1} "#,
        &format!("{{{}}}", many.join(",")),
        &format!("{{{}}}", long.join(",")),
    ] {
        assert_eq!(digest(body), Err(DUPLICATE), "{body}");
    }
    assert_distinct(&[
        r#"[{"a":1},{"a":1}]"#,
        r#"{"a":{"a":1}}"#,
        r#"{"a":1,"A":1}"#,
        r#"{"a":1,"a ":1}"#,
        r#"{"a":1,"a\u0000":1}"#,
    ]);
}

/// The same for every order in which the two faults could be found.
#[test]
fn of_two_faults_the_first_one_counts() {
    assert_eq!(digest(r#"{"a":1,"a":1},"#), Err(DUPLICATE));
    assert_eq!(digest(r#"[{"a":1,"a":1},}"#), Err(DUPLICATE));
    // Here it stops being JSON before the object ends.
    assert_distinct(&[r#"{"a":1,"a":1"#, r#"{"a":1,"a":1]"#, r#"{"a":1,"a":1,}"#]);
    assert_distinct(&[&b"{\"a\":1,\"a\":1}\xff"[..], b"\xff{\"a\":1,\"a\":1}"]);
}

#[test]
fn what_is_not_json_counts_byte_for_byte() {
    assert_distinct(&[
        &b""[..],
        b" ",
        b"{",
        b"}",
        b"{ ",
        b"[",
        b"]",
        b"[1",
        b"[1 ",
        b"[1,]",
        b"[1, ]",
        b"[,1]",
        b"{\"a\"}",
        b"{\"a\":}",
        b"{\"a\":1,}",
        b"{\"a\":1 ,}",
        b"{a:1}",
        b"{'a':1}",
        b"{\"a\" 1}",
        b"1 2",
        b"[1]x",
        b"[1]\0",
        b"\0",
        b"[1]]",
        b"nul",
        b"nulls",
        b"null x",
        b"True",
        b"\"",
        b"\"a",
        b"\"\\\"",
        b"\"\\x\"",
        b"\"\\u12\"",
        b"\"\\u12g4\"",
        b"\"\\u+123\"",
        b"\"\\ud800\\u\"",
        b"\"\\ud800\\u00\"",
        b"\"\\ud800\\",
        b"\"\n\"",
        b"\"\x1f\"",
        b"\"\0\"",
        b"\xef\xbb\xbf[1]",
        b"[1]\xef\xbb\xbf",
        b"\"\xff\"",
        b"\"\xc3\"",
        b"\"\xed\xa0\x80\"",
        b"\"\xc0\xaf\"",
        b"\xa0[1]",
        b"\x0b[1]",
        b"\x0c[1]",
        b"[1}",
        b"{\"a\":1]",
        b"// c\n1",
        b"[1]/**/",
        b"amount=1",
        b"a",
    ]);
    assert_ne!(digest("[1"), digest("[1 "));
}

#[test]
fn raw_and_canonical_never_meet() {
    // The same bytes, once as JSON and once not.
    let as_json = digest(r#"{"a":1}"#);
    let raw = [
        ("content-type", "application/json"),
        ("content-encoding", "br"),
    ];
    for headers in [&raw[..], &[("content-type", "text/plain")]] {
        let scheme = CanonicalJson::new();
        assert_ne!(digest_under(&scheme, headers, r#"{"a":1}"#), as_json);
    }
    // Nor where the head is one: what canonical text would be, and what precedes it, as raw bytes.
    assert_ne!(digest("[1] x"), digest("[1]"));
}

#[test]
fn the_head_says_whether_a_body_is_read_as_json() {
    let scheme = CanonicalJson::new();
    let is_read = |headers: &[(&str, &str)]| {
        let under = |body| digest_under(&scheme, headers, body);
        under(r#"{"a":1,"b":2}"#) == under(r#"{"b":2, "a":1}"#)
    };
    let media = |media_type| is_read(&[("content-type", media_type)]);
    assert!(is_read(&[]));
    for json in [
        "application/json",
        "Application/JSON ; charset=utf-8",
        "application/problem+json",
        "application/vnd.shop.v2+JSON;a=b",
        "model/gltf+json",
    ] {
        assert!(media(json), "{json}");
    }
    for other in [
        "",
        "text/plain",
        "text/json",
        "application/json5",
        "application/jsonl",
        "application/xml",
        "application/x-www-form-urlencoded",
        "json",
        "+json",
        "application/json+xml",
        "application/geo+json-seq",
        "multipart/form-data; boundary=application/json",
    ] {
        assert!(!media(other), "{other}");
    }
    assert!(!is_read(&[JSON[0], JSON[0]]));
    let coded = |codings: &[&'static str]| {
        let codings = codings.iter().map(|coding| ("content-encoding", *coding));
        is_read(&[JSON[0]].into_iter().chain(codings).collect::<Vec<_>>())
    };
    assert!(coded(&["identity"]) && coded(&[" Identity "]));
    assert!(!coded(&["gzip"]) && !coded(&["identity", "gzip"]) && !coded(&["identity, br"]));
}

/// Duplicates are no fault of what is not read.
#[test]
fn nothing_is_refused_of_a_body_that_is_not_read() {
    let plain = [("content-type", "text/plain")];
    let deep = "[".repeat(1000);
    for body in [r#"{"a":1,"a":1}"#, &deep] {
        assert!(digest_under(&CanonicalJson::new(), &plain, body).is_ok());
    }
}
