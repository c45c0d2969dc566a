//! The same scheme written to be plainly right: into a tree, and out again. Slow.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};
use tower_idempotency::{Fingerprint, UndecodableBody};

use super::{DUPLICATE, TOO_DEEP};

pub enum Tree {
    /// `true`, `false`, `null` or a number, as written.
    Word(String),
    Text(Vec<u16>),
    Array(Vec<Tree>),
    /// By the names' spelling.
    Object(BTreeMap<String, Tree>),
}

pub enum Fault {
    NotJson,
    Refused(UndecodableBody),
}

/// What the scheme says of a JSON POST to `/charges`.
pub fn digest(body: &[u8]) -> Result<Fingerprint, UndecodableBody> {
    match canonical(body) {
        Ok(text) => Ok(framed("json", text.as_bytes())),
        Err(Fault::NotJson) => Ok(framed("raw", body)),
        Err(Fault::Refused(why)) => Err(why),
    }
}

pub fn framed(how: &str, text: &[u8]) -> Fingerprint {
    let json = Some(&b"application/json"[..]);
    let head = [
        Some(&b"POST"[..]),
        Some(b"/charges"),
        None,
        json,
        None,
        None,
    ];
    let mut digest = Sha256::new();
    for part in head.into_iter().chain([Some(how.as_bytes()), Some(text)]) {
        let length = part.map_or(u64::MAX, |part| part.len() as u64);
        digest.update(length.to_be_bytes());
        digest.update(part.unwrap_or_default());
    }
    Fingerprint::from_bytes(digest.finalize().into())
}

pub fn canonical(body: &[u8]) -> Result<String, Fault> {
    let text = str::from_utf8(body).map_err(|_| Fault::NotJson)?;
    let mut rest = Rest {
        chars: text.chars().collect(),
        at: 0,
    };
    let tree = rest.value(0)?;
    rest.space();
    match rest.at == rest.chars.len() {
        true => Ok(tree.text()),
        false => Err(Fault::NotJson),
    }
}

struct Rest {
    chars: Vec<char>,
    at: usize,
}

impl Rest {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn take(&mut self) -> Result<char, Fault> {
        let next = self.peek().ok_or(Fault::NotJson)?;
        self.at += 1;
        Ok(next)
    }

    fn expect(&mut self, wanted: char) -> Result<(), Fault> {
        match self.take()? == wanted {
            true => Ok(()),
            false => Err(Fault::NotJson),
        }
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(' ' | '\n' | '\r' | '\t')) {
            self.at += 1;
        }
    }

    fn value(&mut self, depth: usize) -> Result<Tree, Fault> {
        self.space();
        match self.peek() {
            Some('"') => Ok(Tree::Text(self.string()?)),
            Some('{' | '[') if depth == 128 => Err(Fault::Refused(TOO_DEEP)),
            Some('{') => self.object(depth + 1),
            Some('[') => self.array(depth + 1),
            _ => self.word(),
        }
    }

    fn array(&mut self, depth: usize) -> Result<Tree, Fault> {
        self.expect('[')?;
        let mut elements = Vec::new();
        self.space();
        if self.peek() == Some(']') {
            self.at += 1;
            return Ok(Tree::Array(elements));
        }
        loop {
            elements.push(self.value(depth)?);
            self.space();
            match self.take()? {
                ',' => {}
                ']' => return Ok(Tree::Array(elements)),
                _ => return Err(Fault::NotJson),
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Tree, Fault> {
        self.expect('{')?;
        let mut members = BTreeMap::new();
        let mut twice = false;
        self.space();
        if self.peek() == Some('}') {
            self.at += 1;
            return Ok(Tree::Object(members));
        }
        loop {
            self.space();
            let name = spelling(&self.string()?);
            self.space();
            self.expect(':')?;
            twice |= members.insert(name, self.value(depth)?).is_some();
            self.space();
            match self.take()? {
                ',' => {}
                '}' if twice => return Err(Fault::Refused(DUPLICATE)),
                '}' => return Ok(Tree::Object(members)),
                _ => return Err(Fault::NotJson),
            }
        }
    }

    fn string(&mut self) -> Result<Vec<u16>, Fault> {
        self.expect('"')?;
        let mut units = Vec::new();
        loop {
            match self.take()? {
                '"' => return Ok(units),
                '\\' => units.push(match self.take()? {
                    'b' => 8,
                    'f' => 12,
                    'n' => 10,
                    'r' => 13,
                    't' => 9,
                    'u' => {
                        let mut unit = 0;
                        for _ in 0..4 {
                            let digit = self.take()?.to_digit(16).ok_or(Fault::NotJson)?;
                            unit = unit * 16 + digit as u16;
                        }
                        unit
                    }
                    itself @ ('"' | '\\' | '/') => itself as u16,
                    _ => return Err(Fault::NotJson),
                }),
                '\0'..' ' => return Err(Fault::NotJson),
                other => units.extend_from_slice(other.encode_utf16(&mut [0; 2])),
            }
        }
    }

    fn word(&mut self) -> Result<Tree, Fault> {
        let from = self.at;
        while let Some('a'..='z' | 'A'..='Z' | '0'..='9' | '+' | '-' | '.') = self.peek() {
            self.at += 1;
        }
        let word: String = self.chars[from..self.at].iter().collect();
        match word.as_str() {
            "true" | "false" | "null" => Ok(Tree::Word(word)),
            _ if is_number(&word) => Ok(Tree::Word(word)),
            _ => Err(Fault::NotJson),
        }
    }
}

/// RFC 8259 §6, part by part from the end.
fn is_number(word: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (rest, exponent) = match word.split_once(['e', 'E']) {
        Some((rest, exponent)) => (rest, Some(exponent)),
        None => (word, None),
    };
    let (whole, fraction) = match rest.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (rest, None),
    };
    let whole = whole.strip_prefix('-').unwrap_or(whole);
    let exponent = exponent.map(|text| text.strip_prefix(['+', '-']).unwrap_or(text));
    digits(whole)
        && (whole == "0" || !whole.starts_with('0'))
        && fraction.is_none_or(digits)
        && exponent.is_none_or(digits)
}

impl Tree {
    fn text(&self) -> String {
        match self {
            Self::Word(word) => word.clone(),
            Self::Text(units) => format!("\"{}\"", spelling(units)),
            Self::Array(elements) => {
                let elements: Vec<_> = elements.iter().map(Self::text).collect();
                format!("[{}]", elements.join(","))
            }
            Self::Object(members) => {
                let members = members.iter();
                let members = members.map(|(name, value)| format!("\"{name}\":{}", value.text()));
                format!("{{{}}}", members.collect::<Vec<_>>().join(","))
            }
        }
    }
}

pub fn spelling(units: &[u16]) -> String {
    let mut text = String::new();
    for character in char::decode_utf16(units.iter().copied()) {
        match character {
            Err(lone) => text += &format!("\\u{:04x}", lone.unpaired_surrogate()),
            Ok('"') => text += "\\\"",
            Ok('\\') => text += "\\\\",
            Ok('\u{8}') => text += "\\b",
            Ok('\u{c}') => text += "\\f",
            Ok('\n') => text += "\\n",
            Ok('\r') => text += "\\r",
            Ok('\t') => text += "\\t",
            Ok(control @ '\0'..' ') => text += &format!("\\u{:04x}", control as u32),
            Ok(other) => text.push(other),
        }
    }
    text
}
