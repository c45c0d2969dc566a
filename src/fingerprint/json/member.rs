//! The one value that a JSON Pointer (RFC 6901) names, found without reading the rest into memory.

use std::borrow::Cow;

use super::{
    DUPLICATE, TOO_DEEP,
    escapes::unit,
    ignored::unescaped,
    reader::{MAX_DEPTH, Unread},
    scan::{number, peek, plain, space, word},
};
use crate::UndecodableBody;

/// A pointer to a member or an element, as it was written and token by token.
#[derive(Debug, Clone)]
pub(crate) struct Pointer {
    written: Box<str>,
    tokens: Box<[Box<str>]>,
}

/// What a pointer names in a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Named<'b> {
    /// There is no such place.
    Nothing,
    /// A string: as it stands between its quotes, and what that says. `None` where it has half a character.
    Text(&'b str, Option<Cow<'b, str>>),
    /// A number without fraction and exponent, as it stands there.
    Integer(&'b str),
    /// Anything else.
    Other,
}

impl Pointer {
    /// Reads a pointer; the error completes a sentence about it.
    pub(crate) fn parse(pointer: &str) -> Result<Self, &'static str> {
        let tokens = pointer
            .strip_prefix('/')
            .ok_or("names no member; a JSON Pointer begins with a slash, as in \"/id\"")?;
        let tokens: Option<Box<[Box<str>]>> = tokens
            .split('/')
            .map(|token| unescaped(token).map(String::into_boxed_str))
            .collect();
        let tokens =
            tokens.ok_or("is no JSON Pointer; write ~ as \"~0\", and / within a name as \"~1\"")?;
        if tokens.len() > MAX_DEPTH {
            return Err("leads deeper than 128 arrays and objects, where nothing is read");
        }
        let written = pointer.into();
        Ok(Self { written, tokens })
    }

    /// As it was written.
    pub(crate) fn as_str(&self) -> &str {
        &self.written
    }

    /// What this names in a body. All of the body is looked at once, whatever is in it: what is no JSON
    /// further on is no JSON.
    ///
    /// Names are compared as what they say, after escapes. An element is named by its number, without
    /// leading zeros.
    ///
    /// # Errors
    ///
    /// When the body is not JSON (RFC 8259, UTF-8, without a byte order mark), when an object on the way has two members of the
    /// name that leads on, or when arrays and objects stand in each other more than 128 deep.
    pub(crate) fn find<'b>(&self, body: &'b [u8]) -> Result<Named<'b>, UndecodableBody> {
        let text = std::str::from_utf8(body).map_err(|_| UndecodableBody(NOT_JSON))?;
        whole(text, &self.tokens).map_err(|unread| {
            UndecodableBody(match unread {
                Unread::NotJson => NOT_JSON,
                Unread::DuplicateMember => DUPLICATE,
                Unread::TooDeep => TOO_DEEP,
            })
        })
    }
}

const NOT_JSON: &str = "it is not JSON, in which the idempotency key is looked for";

fn whole<'b>(text: &'b str, tokens: &[Box<str>]) -> Result<Named<'b>, Unread> {
    let body = text.as_bytes();
    let (at, named) = find(text, space(body, 0), tokens, 0)?;
    match space(body, at) == body.len() {
        true => Ok(named),
        false => Err(Unread::NotJson),
    }
}

/// Reads the value that begins here, and finds what these tokens name in it. As deep as there are tokens.
fn find<'b>(
    text: &'b str,
    at: usize,
    tokens: &[Box<str>],
    depth: usize,
) -> Result<(usize, Named<'b>), Unread> {
    let Some((token, rest)) = tokens.split_first() else {
        return here(text, at, depth);
    };
    match peek(text.as_bytes(), at) {
        b'{' => in_object(text, at, token, rest, depth),
        b'[' => in_array(text, at, token, rest, depth),
        _ => Ok((skip(text.as_bytes(), at, depth)?, Named::Nothing)),
    }
}

fn in_object<'b>(
    text: &'b str,
    at: usize,
    token: &str,
    rest: &[Box<str>],
    depth: usize,
) -> Result<(usize, Named<'b>), Unread> {
    let body = text.as_bytes();
    let mut found = None;
    let mut at = space(body, at + 1);
    if peek(body, at) == b'}' {
        return Ok((at + 1, Named::Nothing));
    }
    loop {
        let (value, end_of_name) = name(body, at)?;
        if says(&text[at..end_of_name], token) {
            let (behind, named) = find(text, value, rest, depth + 1)?;
            if found.replace(named).is_some() {
                return Err(Unread::DuplicateMember);
            }
            at = behind;
        } else {
            at = skip(body, value, depth + 1)?;
        }
        at = space(body, at);
        match peek(body, at) {
            b',' => at = space(body, at + 1),
            b'}' => return Ok((at + 1, found.unwrap_or(Named::Nothing))),
            _ => return Err(Unread::NotJson),
        }
    }
}

fn in_array<'b>(
    text: &'b str,
    at: usize,
    token: &str,
    rest: &[Box<str>],
    depth: usize,
) -> Result<(usize, Named<'b>), Unread> {
    let body = text.as_bytes();
    // Spelled like this and not otherwise: neither `01` nor `+1` names the element 1.
    let wanted = token.parse().ok();
    let wanted = wanted.filter(|number: &usize| number.to_string() == token);
    let mut found = Named::Nothing;
    let mut at = space(body, at + 1);
    if peek(body, at) == b']' {
        return Ok((at + 1, found));
    }
    for element in 0.. {
        if Some(element) == wanted {
            (at, found) = find(text, at, rest, depth + 1)?;
        } else {
            at = skip(body, at, depth + 1)?;
        }
        at = space(body, at);
        match peek(body, at) {
            b',' => at = space(body, at + 1),
            b']' => break,
            _ => return Err(Unread::NotJson),
        }
    }
    Ok((at + 1, found))
}

/// The value that begins here is the one.
fn here(text: &str, at: usize, depth: usize) -> Result<(usize, Named<'_>), Unread> {
    let body = text.as_bytes();
    let end = skip(body, at, depth)?;
    let named = match peek(body, at) {
        b'"' => Named::Text(&text[at + 1..end - 1], unquoted(&text[at..end])),
        b'-' | b'0'..=b'9' if !text[at..end].contains(['.', 'e', 'E']) => {
            Named::Integer(&text[at..end])
        }
        _ => Named::Other,
    };
    Ok((end, named))
}

/// Whether a string, which stands here in its quotes, says this.
fn says(quoted: &str, text: &str) -> bool {
    unquoted(quoted).is_some_and(|says| says == text)
}

/// What a string says that is known to be one; `None` where it has half a character.
fn unquoted(quoted: &str) -> Option<Cow<'_, str>> {
    match quoted.contains('\\') {
        false => Some(Cow::Borrowed(&quoted[1..quoted.len() - 1])),
        true => serde_json::from_str(quoted).ok().map(Cow::Owned),
    }
}

/// Over the value that begins here, at this depth, with all that is in it.
fn skip(body: &[u8], mut at: usize, outside: usize) -> Result<usize, Unread> {
    let mut is_object = [false; MAX_DEPTH + 1];
    let mut depth = outside;
    loop {
        at = match peek(body, at) {
            b'"' => string(body, at)?,
            b'-' | b'0'..=b'9' => number(body, at)?,
            b't' => word(body, at, b"true")?,
            b'f' => word(body, at, b"false")?,
            b'n' => word(body, at, b"null")?,
            opening @ (b'{' | b'[') => {
                if depth == MAX_DEPTH {
                    return Err(Unread::TooDeep);
                }
                let within = space(body, at + 1);
                match (opening, peek(body, within)) {
                    // Two more than the opening one are the closing ones, in ASCII.
                    (_, closing) if closing == opening + 2 => within + 1,
                    _ => {
                        depth += 1;
                        is_object[depth] = opening == b'{';
                        at = match is_object[depth] {
                            true => name(body, within)?.0,
                            false => within,
                        };
                        continue;
                    }
                }
            }
            _ => return Err(Unread::NotJson),
        };
        // Behind a value: on to the next one, or out of what ends here.
        loop {
            if depth == outside {
                return Ok(at);
            }
            at = space(body, at);
            match (peek(body, at), is_object[depth]) {
                (b',', true) => {
                    at = name(body, space(body, at + 1))?.0;
                    break;
                }
                (b',', false) => {
                    at = space(body, at + 1);
                    break;
                }
                (b'}', true) | (b']', false) => {
                    depth -= 1;
                    at += 1;
                }
                _ => return Err(Unread::NotJson),
            }
        }
    }
}

/// Over the name that begins here and the colon behind it: where its value begins, and where the name ends.
fn name(body: &[u8], at: usize) -> Result<(usize, usize), Unread> {
    if peek(body, at) != b'"' {
        return Err(Unread::NotJson);
    }
    let end = string(body, at)?;
    let colon = space(body, end);
    match peek(body, colon) {
        b':' => Ok((space(body, colon + 1), end)),
        _ => Err(Unread::NotJson),
    }
}

/// Over a string.
fn string(body: &[u8], at: usize) -> Result<usize, Unread> {
    let mut at = at + 1;
    loop {
        at = plain(body, at);
        match (peek(body, at), peek(body, at + 1)) {
            (b'"', _) => return Ok(at + 1),
            (b'\\', b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => at += 2,
            (b'\\', b'u') => {
                unit(body, at)?;
                at += 6;
            }
            _ => return Err(Unread::NotJson),
        }
    }
}

#[cfg(test)]
#[path = "member_tests.rs"]
mod tests;
