use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn pointer(written: &str) -> Pointer {
    Pointer::parse(written).unwrap()
}

/// A document, and the pointers to all that is in it, in the words of another implementation.
fn pointers(value: &Value, here: &str, all: &mut Vec<String>) {
    let mut step = |token: &str, value: &Value| {
        let token = token.replace('~', "~0").replace('/', "~1");
        let there = format!("{here}/{token}");
        all.push(there.clone());
        pointers(value, &there, all);
    };
    match value {
        Value::Object(members) => members.iter().for_each(|(name, value)| step(name, value)),
        Value::Array(elements) => {
            let numbered = elements.iter().enumerate();
            numbered.for_each(|(number, value)| step(&number.to_string(), value));
        }
        _ => {}
    }
}

fn document() -> impl Strategy<Value = Value> {
    let name = "[ab0-2~/\\\\\"é\u{1}]{0,3}";
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-1.0e9..1.0e9).prop_map(|number: f64| Value::from(number)),
        ".{0,6}".prop_map(Value::from),
        name.prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map(name, inner, 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// What the other implementation finds, in our words.
fn agrees(named: &Named<'_>, found: Option<&Value>) -> bool {
    match (named, found) {
        (Named::Nothing, None) => true,
        (Named::Text(_, Some(text)), Some(Value::String(found))) => text == found,
        (Named::Integer(digits), Some(Value::Number(number))) => {
            (number.is_i64() || number.is_u64()) && *digits == number.to_string()
        }
        (Named::Other, Some(Value::Number(number))) => number.is_f64(),
        (Named::Other, Some(found)) => !found.is_string(),
        _ => false,
    }
}

proptest! {
    #[test]
    fn whatever_is_in_a_document_is_found_as_another_implementation_finds_it(
        value in document(),
        pretty in any::<bool>(),
        stray in "(/[ab0-2~01]{0,3}){1,3}",
    ) {
        let body = match pretty {
            true => serde_json::to_vec_pretty(&value).unwrap(),
            false => serde_json::to_vec(&value).unwrap(),
        };
        let mut all = Vec::new();
        pointers(&value, "", &mut all);
        all.extend(Pointer::parse(&stray).is_ok().then_some(stray));
        for written in all {
            let named = pointer(&written).find(&body).unwrap();
            prop_assert!(agrees(&named, value.pointer(&written)), "{written}: {named:?}");
        }
    }

    #[test]
    fn what_is_not_json_is_told_from_what_is_as_another_implementation_does(
        value in document(),
        at in any::<prop::sample::Index>(),
        byte in prop::sample::select(&b"{}[]\",:\\ 0-.eutn\x00\xff"[..]),
        cut in any::<bool>(),
    ) {
        let mut body = serde_json::to_vec(&value).unwrap();
        let at = at.index(body.len());
        match cut {
            true => body.truncate(at),
            false => body[at] = byte,
        }
        // Two members of one name may have come about, and a number too large for the other one.
        let other = serde_json::from_slice::<Value>(&body);
        let found = pointer("/no/such/place").find(&body);
        match other {
            Ok(_) => prop_assert!(found.is_ok(), "{:?}", String::from_utf8_lossy(&body)),
            Err(error) if error.to_string().contains("out of range") => {}
            Err(error) if error.to_string().contains("surrogate") => {}
            Err(_) => prop_assert!(found.is_err(), "{:?}", String::from_utf8_lossy(&body)),
        }
    }
}

#[test]
fn elements_are_named_by_their_numbers_only() {
    let body = br#"{"a":["x","y"]}"#;
    for (written, found) in [
        ("/a/0", true),
        ("/a/1", true),
        ("/a/2", false),
        ("/a/01", false),
        ("/a/+1", false),
        ("/a/-", false),
        ("/a/-1", false),
        ("/a/", false),
        ("/a/18446744073709551616", false),
    ] {
        let named = pointer(written).find(body).unwrap();
        assert_eq!(named != Named::Nothing, found, "{written}");
    }
}

#[test]
fn depth_is_bounded_on_the_way_and_beside_it() {
    let nested = |depth: usize| {
        let (open, close) = ("{\"a\":".repeat(depth), "}".repeat(depth));
        format!("{open}7{close}").into_bytes()
    };
    let way = pointer(&"/a".repeat(128));
    assert_eq!(way.find(&nested(128)), Ok(Named::Integer("7")));
    for elsewhere in [&way, &pointer("/b"), &pointer("/a/b"), &pointer("/a/a")] {
        assert!(elsewhere.find(&nested(128)).is_ok());
        assert_eq!(elsewhere.find(&nested(129)), Err(UndecodableBody(TOO_DEEP)));
    }
    assert!(Pointer::parse(&"/a".repeat(129)).is_err());
}
