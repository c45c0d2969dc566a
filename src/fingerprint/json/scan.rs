//! The tokens of RFC 8259, each from its position in a body to the one behind it.

use super::reader::Unread;

/// The byte at this position. What ends the body reads as NUL, which stands nowhere in JSON.
#[inline]
pub(super) fn peek(body: &[u8], at: usize) -> u8 {
    body.get(at).copied().unwrap_or(0)
}

/// Over the white space that stands here, if any.
#[inline]
pub(super) fn space(body: &[u8], mut at: usize) -> usize {
    while matches!(peek(body, at), b' ' | b'\n' | b'\r' | b'\t') {
        at += 1;
    }
    at
}

/// Over `true`, `false` or `null`.
#[inline]
pub(super) fn word(body: &[u8], at: usize, word: &[u8]) -> Result<usize, Unread> {
    match body[at..].starts_with(word) {
        true => Ok(at + word.len()),
        false => Err(Unread::NotJson),
    }
}

/// Over a number.
#[inline]
pub(super) fn number(body: &[u8], mut at: usize) -> Result<usize, Unread> {
    let mut byte = peek(body, at);
    if byte == b'-' {
        at += 1;
        byte = peek(body, at);
    }
    at = match byte {
        b'0' => at + 1,
        b'1'..=b'9' => digits(body, at + 1),
        _ => return Err(Unread::NotJson),
    };
    match peek(body, at) {
        b'.' | b'e' | b'E' => fraction(body, at),
        _ => Ok(at),
    }
}

/// Over the fraction and the exponent of a number, at least one of which is there.
fn fraction(body: &[u8], mut at: usize) -> Result<usize, Unread> {
    if peek(body, at) == b'.' {
        at = some_digits(body, at + 1)?;
    }
    if matches!(peek(body, at), b'e' | b'E') {
        at += 1;
        if matches!(peek(body, at), b'+' | b'-') {
            at += 1;
        }
        at = some_digits(body, at)?;
    }
    Ok(at)
}

#[inline]
fn digits(body: &[u8], mut at: usize) -> usize {
    while peek(body, at).is_ascii_digit() {
        at += 1;
    }
    at
}

fn some_digits(body: &[u8], at: usize) -> Result<usize, Unread> {
    match digits(body, at) {
        end if end > at => Ok(end),
        _ => Err(Unread::NotJson),
    }
}

/// Over what stands in a string as it is: to the next quote, backslash or control character.
#[inline]
pub(super) fn plain(body: &[u8], mut at: usize) -> usize {
    while let Some(word) = eight(body, at) {
        let found = special(word);
        if found != 0 {
            return at + (found.trailing_zeros() / 8) as usize;
        }
        at += 8;
    }
    while !matches!(peek(body, at), b'"' | b'\\' | ..b' ') {
        at += 1;
    }
    at
}

/// The eight bytes from this position, the first one lowest.
#[inline]
pub(super) fn eight(body: &[u8], at: usize) -> Option<u64> {
    let word = body.get(at..)?.first_chunk()?;
    Some(u64::from_le_bytes(*word))
}

/// Has the high bit of the first special byte of these eight set, and none below; zero if there is
/// none.
#[inline]
pub(super) fn special(word: u64) -> u64 {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    let quote = (word ^ (ONES * b'"' as u64)).wrapping_sub(ONES);
    let backslash = (word ^ (ONES * b'\\' as u64)).wrapping_sub(ONES);
    let control = word.wrapping_sub(ONES * b' ' as u64);
    // A byte of 0x80 and more is none of them.
    (quote | backslash | control) & !word & (ONES << 7)
}
