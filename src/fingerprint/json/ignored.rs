//! Members that do not count, named by JSON Pointers (RFC 6901).

use std::collections::BTreeMap;

use super::escapes::spelled;

/// What does not count inside a value.
#[derive(Debug, Clone, Default)]
pub(super) struct Ignored {
    /// By the tokens that lead there, in canonical spelling.
    below: BTreeMap<Vec<u8>, Ignored>,
    /// Whether the value itself is left out.
    itself: bool,
}

impl Ignored {
    /// Adds what this pointer names.
    ///
    /// # Panics
    ///
    /// When it is no pointer, or names the whole document.
    pub(super) fn add(&mut self, pointer: &str) {
        let tokens = pointer.strip_prefix('/').unwrap_or_else(|| {
            panic!(
                "ignoring: {pointer:?} names no member; a JSON Pointer begins with a slash, as in \"/requested_at\""
            )
        });
        let mut here = self;
        for token in tokens.split('/') {
            let name = unescaped(token).unwrap_or_else(|| {
                panic!(
                    "ignoring: {pointer:?} is no JSON Pointer; write ~ as \"~0\", and / within a name as \"~1\""
                )
            });
            here = here.below.entry(spelled(&name)).or_default();
        }
        here.itself = true;
    }

    /// What is left out in the member of this name, or in the element of this number.
    pub(super) fn below(&self, token: &[u8]) -> Option<&Self> {
        self.below.get(token)
    }

    /// Whether the member of this name is left out.
    pub(super) fn leaves_out(&self, name: &[u8]) -> bool {
        self.below.get(name).is_some_and(|below| below.itself)
    }
}

/// The token without its escapes: `~1` is a slash, `~0` a tilde.
pub(super) fn unescaped(token: &str) -> Option<String> {
    let mut parts = token.split('~');
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = match part.as_bytes().first() {
            Some(b'0') => '~',
            Some(b'1') => '/',
            _ => return None,
        };
        name.push(rest);
        name.push_str(&part[1..]);
    }
    Some(name)
}
