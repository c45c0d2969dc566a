//! The one spelling of what does not stand in a string as it is.
//!
//! It is that of RFC 8785 §3.2.2.2: `\"`, `\\`, `\b`, `\f`, `\n`, `\r`, `\t`, other control characters
//! as `\u001f`, everything else as itself. To that a lone surrogate is added, which RFC 8785
//! refuses: `\udead`, in lower case. No character is spelled that way, so it meets nothing.

use super::{reader::Unread, scan::peek, text::Text};

/// Reads one escape after the other, from a backslash on.
pub(super) fn escapes(text: &mut Text<'_>, body: &[u8], mut at: usize) -> Result<usize, Unread> {
    while peek(body, at) == b'\\' {
        match peek(body, at + 1) {
            // The only spelling they have, or the shortest.
            b'"' | b'\\' | b'b' | b'f' | b'n' | b'r' | b't' => at += 2,
            b'/' => {
                text.replace(at, at + 1, b"");
                at += 2;
            }
            b'u' => at = unicode(text, body, at)?,
            _ => return Err(Unread::NotJson),
        }
    }
    Ok(at)
}

/// Reads `\u` and its digits, both halves where two of them are one character.
fn unicode(text: &mut Text<'_>, body: &[u8], at: usize) -> Result<usize, Unread> {
    let first = unit(body, at)?;
    let mut end = at + 6;
    let mut code = first;
    if (0xD800..0xDC00).contains(&first) && body[end..].starts_with(b"\\u") {
        let second = unit(body, end)?;
        if (0xDC00..0xE000).contains(&second) {
            code = 0x1_0000 + ((first - 0xD800) << 10) + (second - 0xDC00);
            end += 6;
        }
    }
    match char::from_u32(code) {
        Some(character) => spell(character, |bytes| text.replace(at, end, bytes)),
        None => text.replace(at, end, &spelled_out(code)),
    }
    Ok(end)
}

/// The four digits of a `\u`.
pub(super) fn unit(body: &[u8], at: usize) -> Result<u32, Unread> {
    let digits = body.get(at + 2..at + 6).ok_or(Unread::NotJson)?;
    digits.iter().try_fold(0, |unit, digit| {
        let digit = char::from(*digit).to_digit(16).ok_or(Unread::NotJson)?;
        Ok(unit << 4 | digit)
    })
}

/// The canonical spelling of a text, as it stands between the quotes.
pub(super) fn spelled(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for character in text.chars() {
        spell(character, |spelling| bytes.extend_from_slice(spelling));
    }
    bytes
}

#[inline]
fn spell(character: char, put: impl FnOnce(&[u8])) {
    match character {
        '"' => put(b"\\\""),
        '\\' => put(b"\\\\"),
        '\u{8}' => put(b"\\b"),
        '\u{c}' => put(b"\\f"),
        '\n' => put(b"\\n"),
        '\r' => put(b"\\r"),
        '\t' => put(b"\\t"),
        '\0'..' ' => put(&spelled_out(character.into())),
        _ => put(character.encode_utf8(&mut [0; 4]).as_bytes()),
    }
}

/// `\u` and four digits.
fn spelled_out(unit: u32) -> [u8; 6] {
    let digit = |shift: u32| b"0123456789abcdef"[(unit >> shift & 0xF) as usize];
    [b'\\', b'u', digit(12), digit(8), digit(4), digit(0)]
}
