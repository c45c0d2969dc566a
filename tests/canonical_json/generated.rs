//! Documents nobody thought of: written twice in different ways, changed in one place, broken.

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*};

use super::{
    digest,
    reference::{self, Fault},
};

#[derive(Debug, Clone, PartialEq)]
enum Value {
    /// A word or number, as written.
    Word(String),
    Text(Vec<u16>),
    Array(Vec<Value>),
    Object(BTreeMap<Vec<u16>, Value>),
}

fn words() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        Just("false".to_owned()),
        "-?(0|[1-9][0-9]{0,20})(\\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?",
        "-?(0|[1-9])",
    ]
}

/// UTF-16, with halves that stand alone.
fn texts() -> impl Strategy<Value = Vec<u16>> {
    let unit = prop_oneof![
        8 => 0x20..0x7f_u16,
        1 => 0..0x20_u16,
        1 => Just(u16::from(b'"')),
        1 => Just(u16::from(b'\\')),
        1 => Just(u16::from(b'/')),
        1 => any::<u16>(),
        1 => 0xD800..0xE000_u16,
    ];
    vec(unit, 0..24)
}

/// Few enough to meet, and with beginnings in common.
fn names() -> impl Strategy<Value = Vec<u16>> {
    prop_oneof![
        "[ab]{0,3}".prop_map(|name| name.encode_utf16().collect()),
        "(the_common_prefix_)?[a-c]{1,10}".prop_map(|name| name.encode_utf16().collect()),
        texts(),
    ]
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![words().prop_map(Value::Word), texts().prop_map(Value::Text)];
    leaf.prop_recursive(6, 120, 20, |inside| {
        prop_oneof![
            vec(inside.clone(), 0..8).prop_map(Value::Array),
            proptest::collection::btree_map(names(), inside, 0..20).prop_map(Value::Object),
        ]
    })
}

/// Chooses how a document is written.
struct Pen {
    state: u64,
    text: String,
}

impl Pen {
    fn writing(value: &Value, seed: u64) -> String {
        let mut pen = Self {
            state: seed | 1,
            text: String::new(),
        };
        pen.value(value);
        pen.text
    }

    fn below(&mut self, end: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % end as u64) as usize
    }

    fn space(&mut self) {
        let space = ["", "", "", " ", "\n", "\t", "\r\n  ", "      "];
        let chosen = self.below(space.len());
        self.text += space[chosen];
    }

    fn value(&mut self, value: &Value) {
        self.space();
        match value {
            Value::Word(word) => self.text += word,
            Value::Text(units) => self.string(units),
            Value::Array(elements) => {
                self.text.push('[');
                self.space();
                for (nth, element) in elements.iter().enumerate() {
                    self.text += if nth > 0 { "," } else { "" };
                    self.value(element);
                }
                self.text.push(']');
            }
            Value::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                for nth in (1..members.len()).rev() {
                    let other = self.below(nth + 1);
                    members.swap(nth, other);
                }
                self.text.push('{');
                self.space();
                for (nth, (name, value)) in members.into_iter().enumerate() {
                    self.text += if nth > 0 { "," } else { "" };
                    self.space();
                    self.string(name);
                    self.space();
                    self.text.push(':');
                    self.value(value);
                }
                self.text.push('}');
            }
        }
        self.space();
    }

    fn string(&mut self, units: &[u16]) {
        self.text.push('"');
        for character in char::decode_utf16(units.iter().copied()) {
            match character {
                Err(half) => self.escape(half.unpaired_surrogate()),
                Ok(character) => self.character(character),
            }
        }
        self.text.push('"');
    }

    fn character(&mut self, character: char) {
        let short = match character {
            '\u{8}' => "\\b",
            '\u{c}' => "\\f",
            '\n' => "\\n",
            '\r' => "\\r",
            '\t' => "\\t",
            '"' => "\\\"",
            '\\' => "\\\\",
            '/' => "\\/",
            _ => "",
        };
        let must = character < ' ' || matches!(character, '"' | '\\');
        match self.below(6) {
            0 => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    self.escape(*unit);
                }
            }
            1..=3 if !short.is_empty() => self.text += short,
            _ if !must => self.text.push(character),
            _ if !short.is_empty() => self.text += short,
            _ => self.escape(character as u16),
        }
    }

    fn escape(&mut self, unit: u16) {
        let digits = match self.below(2) {
            0 => format!("\\u{unit:04x}"),
            _ => format!("\\u{unit:04X}"),
        };
        self.text += &digits;
    }
}

/// The same value with one leaf, name or order changed, by its number.
fn changed(value: &Value, place: &mut usize) -> Option<Value> {
    let here = *place == 0;
    *place = place.wrapping_sub(1);
    match value {
        Value::Word(word) if here => Some(Value::Text(word.encode_utf16().collect())),
        Value::Text(units) if here => {
            let mut units = units.clone();
            units.push(0xDFFF);
            Some(Value::Text(units))
        }
        Value::Word(_) | Value::Text(_) => None,
        Value::Array(elements) => {
            if here {
                let mut elements = elements.clone();
                match elements.windows(2).position(|pair| pair[0] != pair[1]) {
                    Some(at) => elements.swap(at, at + 1),
                    None => elements.push(Value::Word("0".into())),
                }
                return Some(Value::Array(elements));
            }
            elements.iter().enumerate().find_map(|(at, element)| {
                let mut elements = elements.clone();
                elements[at] = changed(element, place)?;
                Some(Value::Array(elements))
            })
        }
        Value::Object(members) => {
            if here {
                let mut members = members.clone();
                let value = members
                    .pop_first()
                    .map_or(Value::Word("0".into()), |first| first.1);
                let mut name = vec![0xDFFF];
                while members.contains_key(&name) {
                    name.push(0xDFFF);
                }
                members.insert(name, value);
                return Some(Value::Object(members));
            }
            members.iter().find_map(|(name, member)| {
                let mut members = members.clone();
                members.insert(name.clone(), changed(member, place)?);
                Some(Value::Object(members))
            })
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn however_a_document_is_written_it_is_one(value in values(), a: u64, b: u64) {
        let (a, b) = (Pen::writing(&value, a), Pen::writing(&value, b));
        let found = digest(&a);
        prop_assert!(found.is_ok());
        prop_assert_eq!(found, digest(&b), "{} and {}", a, b);
        prop_assert_eq!(found, reference::digest(a.as_bytes()), "{}", a);
    }

    #[test]
    fn the_canonical_text_is_its_own(value in values(), seed: u64) {
        let text = Pen::writing(&value, seed);
        let Ok(canonical) = reference::canonical(text.as_bytes()) else {
            panic!("{text} is JSON");
        };
        prop_assert_eq!(digest(&canonical), Ok(reference::framed("json", canonical.as_bytes())));
        prop_assert_eq!(digest(&text), digest(&canonical));
    }

    #[test]
    fn a_document_changed_in_one_place_is_another(
        value in values(),
        place in 0..40_usize,
        a: u64,
        b: u64,
    ) {
        // Places go round.
        let changed = (0..=place).rev().find_map(|mut place| changed(&value, &mut place));
        let changed = changed.expect("there is a first place");
        prop_assert_ne!(&changed, &value);
        let (a, b) = (Pen::writing(&value, a), Pen::writing(&changed, b));
        prop_assert_ne!(digest(&a), digest(&b), "{} and {}", a, b);
    }

    /// Most of these are no JSON; some still are, or have two members of one name.
    #[test]
    fn whatever_the_bytes_are_they_count_as_the_reference_says(
        value in values(),
        seed: u64,
        edits in vec((any::<prop::sample::Index>(), edits()), 1..4),
    ) {
        let mut body = Pen::writing(&value, seed).into_bytes();
        for (at, edit) in edits {
            let at = at.index(body.len() + 1);
            let end = body.len().min(at + edit.0);
            body.splice(at..end, edit.1);
        }
        prop_assert_eq!(digest(&body), reference::digest(&body), "{}", String::from_utf8_lossy(&body));
    }
}

/// How many bytes go, and what comes instead.
fn edits() -> impl Strategy<Value = (usize, Vec<u8>)> {
    let byte = prop_oneof![
        4 => prop::sample::select(&b"{}[]\",:\\ u0e.-+1n\x00\x1f\xff\xc3\xa9"[..]),
        1 => any::<u8>(),
    ];
    (0..3_usize, vec(byte, 0..3))
}

/// The test above is worth something only if its bodies are of all kinds.
#[test]
fn the_reference_knows_all_kinds_of_bodies() {
    assert!(reference::canonical(b" {\"a\" : 1}").is_ok_and(|text| text == "{\"a\":1}"));
    let refused = reference::canonical(b"{\"a\":1,\"a\":1}");
    assert!(matches!(refused, Err(Fault::Refused(_))));
    assert!(matches!(reference::canonical(b"{"), Err(Fault::NotJson)));
}
