//! The one pass over a body: checks it against RFC 8259, makes its text canonical except for the
//! order of members, and notes where that order has to be made.

use super::{
    document::{Arranged, Document, Member, Part},
    escapes::escapes,
    ignored::Ignored,
    objects::OpenObject,
    order::Sorter,
    scan::{number, peek, plain, space, word},
    text::Text,
};

/// How many arrays and objects may stand in each other.
pub(super) const MAX_DEPTH: usize = 128;

/// Why there is no canonical text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unread {
    NotJson,
    DuplicateMember,
    TooDeep,
}

/// Reads a body of less than 4 GiB.
pub(super) fn read<'a>(body: &'a [u8], ignored: Option<&Ignored>) -> Result<Document<'a>, Unread> {
    // Once for all of it: from here on every cut is made at an ASCII byte.
    if std::str::from_utf8(body).is_err() {
        return Err(Unread::NotJson);
    }
    let mut reader = Reader {
        body,
        text: Text::of(body),
        depth: 0,
        open: [Inside::Nothing; MAX_DEPTH + 1],
        object: OpenObject::default(),
        around: Vec::new(),
        path: Vec::new(),
        pending: Vec::new(),
        arranged: Vec::new(),
        members: Vec::new(),
        sorter: Sorter::default(),
    };
    reader.document(ignored)?;
    Ok(Document {
        text: reader.text.whole(),
        arranged: reader.arranged,
        members: reader.members,
    })
}

pub(super) struct Reader<'a, 'i> {
    pub(super) body: &'a [u8],
    pub(super) text: Text<'a>,
    pub(super) depth: usize,
    /// What is open at each depth.
    open: [Inside; MAX_DEPTH + 1],
    /// The innermost object that is open.
    pub(super) object: OpenObject,
    /// The other ones.
    pub(super) around: Vec<OpenObject>,
    /// What does not count in what is open, for as deep as there is anything.
    pub(super) path: Vec<Step<'i>>,
    /// The members so far of the objects that are open, the innermost object's last.
    pub(super) pending: Vec<Member>,
    /// Objects whose members go out elsewhere than they stand, in the order in which they end.
    pub(super) arranged: Vec<Arranged>,
    /// Their members, object by object.
    pub(super) members: Vec<Part>,
    pub(super) sorter: Sorter,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inside {
    Nothing,
    Array,
    Object,
}

pub(super) struct Step<'i> {
    pub(super) ignored: &'i Ignored,
    /// In an array: the element that is being read.
    element: usize,
}

impl<'i> Reader<'_, 'i> {
    fn document(&mut self, ignored: Option<&'i Ignored>) -> Result<(), Unread> {
        let mut at = 0;
        loop {
            at = match peek(self.body, at) {
                b'"' => self.string(at)?,
                b'-' | b'0'..=b'9' => number(self.body, at)?,
                b'{' => {
                    self.enter(Inside::Object, ignored)?;
                    match self.meets(at + 1, b'}') {
                        Ok(end) => {
                            self.leave();
                            end
                        }
                        Err(within) => {
                            at = self.open_object(within)?;
                            continue;
                        }
                    }
                }
                b'[' => {
                    self.enter(Inside::Array, ignored)?;
                    match self.meets(at + 1, b']') {
                        Ok(end) => {
                            self.leave();
                            end
                        }
                        Err(within) => {
                            at = within;
                            continue;
                        }
                    }
                }
                b't' => word(self.body, at, b"true")?,
                b'f' => word(self.body, at, b"false")?,
                b'n' => word(self.body, at, b"null")?,
                b' ' | b'\n' | b'\r' | b'\t' => {
                    at = self.leave_space_out(at);
                    continue;
                }
                _ => return Err(Unread::NotJson),
            };
            // Behind a value: on to the next one, or out of what ends here.
            loop {
                match (peek(self.body, at), self.open[self.depth]) {
                    (b',', Inside::Object) => {
                        at = self.name(at + 1)?;
                        break;
                    }
                    (b',', Inside::Array) => {
                        self.next_element();
                        at += 1;
                        break;
                    }
                    (b']', Inside::Array) => {
                        self.leave();
                        at += 1;
                    }
                    (b'}', Inside::Object) => {
                        self.close_object(at)?;
                        self.leave();
                        at += 1;
                    }
                    (b' ' | b'\n' | b'\r' | b'\t', _) => at = self.leave_space_out(at),
                    (_, Inside::Nothing) if at == self.body.len() => return Ok(()),
                    _ => return Err(Unread::NotJson),
                }
            }
        }
    }

    /// An array or object begins.
    #[inline(always)]
    fn enter(&mut self, inside: Inside, root: Option<&'i Ignored>) -> Result<(), Unread> {
        if self.depth == MAX_DEPTH {
            return Err(Unread::TooDeep);
        }
        if self.path.len() == self.depth {
            self.step_in(root);
        }
        self.depth += 1;
        self.open[self.depth] = inside;
        Ok(())
    }

    #[inline]
    fn leave(&mut self) {
        if self.path.len() == self.depth {
            self.path.pop();
        }
        self.depth -= 1;
    }

    /// Finds what does not count in the array or object that begins here.
    fn step_in(&mut self, root: Option<&'i Ignored>) {
        let ignored = match (self.path.last(), self.pending.last()) {
            (None, _) => root,
            (Some(step), Some(member)) if self.open[self.depth] == Inside::Object => {
                step.ignored.below(member.name(&self.text))
            }
            (Some(step), _) => step.ignored.below(step.element.to_string().as_bytes()),
        };
        let element = 0;
        self.path
            .extend(ignored.map(|ignored| Step { ignored, element }));
    }

    #[inline]
    fn next_element(&mut self) {
        if self.path.len() == self.depth
            && let Some(step) = self.path.last_mut()
        {
            step.element += 1;
        }
    }

    /// Whether this byte comes next. `Ok`: the position behind it. `Err`: the position of what does.
    #[inline]
    pub(super) fn meets(&mut self, at: usize, byte: u8) -> Result<usize, usize> {
        match peek(self.body, at) {
            found if found == byte => Ok(at + 1),
            b' ' | b'\n' | b'\r' | b'\t' => {
                let at = self.leave_space_out(at);
                match peek(self.body, at) == byte {
                    true => Ok(at + 1),
                    false => Err(at),
                }
            }
            _ => Err(at),
        }
    }

    /// Leaves out the white space that stands here.
    fn leave_space_out(&mut self, at: usize) -> usize {
        let end = space(self.body, at + 1);
        self.text.leave_out(at, end);
        end
    }

    /// Reads a string, and spells it canonically.
    #[inline]
    pub(super) fn string(&mut self, at: usize) -> Result<usize, Unread> {
        let end = plain(self.body, at + 1);
        match peek(self.body, end) {
            b'"' => Ok(end + 1),
            b'\\' => self.escaped_string(end),
            _ => Err(Unread::NotJson),
        }
    }

    /// Reads a string from its first escape on.
    fn escaped_string(&mut self, mut at: usize) -> Result<usize, Unread> {
        loop {
            match peek(self.body, at) {
                b'"' => return Ok(at + 1),
                b'\\' => at = escapes(&mut self.text, self.body, at)?,
                ..b' ' => return Err(Unread::NotJson),
                _ => at = plain(self.body, at),
            }
        }
    }
}
