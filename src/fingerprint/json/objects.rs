//! The objects of a document: their members, as they are read, and where those go.

use super::{
    document::{Arranged, Member, Part},
    order::{FEW, insert, prefix},
    reader::{Reader, Unread},
    scan::{eight, peek, plain, special},
};

/// An object of so many bytes is rewritten where it stands. Longer ones would be rewritten with
/// every object around them.
const SHORT: u32 = 256;

#[derive(Default, Clone, Copy)]
pub(super) struct OpenObject {
    /// The first bytes of its last name; see [`prefix`].
    last: u64,
    /// Where it begins in the text, behind its brace.
    start: u32,
    /// Where its members begin in `pending`.
    members: u32,
    /// How many arranged objects end before it begins.
    before: u32,
    /// Whether a name was not greater than the one before it.
    disordered: bool,
}

impl Reader<'_, '_> {
    /// An object with members begins; reads its first name.
    pub(super) fn open_object(&mut self, at: usize) -> Result<usize, Unread> {
        self.around.push(self.object);
        self.object = OpenObject {
            last: 0,
            start: self.text.position(at),
            members: self.pending.len() as u32,
            before: self.arranged.len() as u32,
            disordered: false,
        };
        self.name(at)
    }

    /// Reads a name and the colon behind it.
    pub(super) fn name(&mut self, at: usize) -> Result<usize, Unread> {
        let at = match self.meets(at, b'"') {
            Ok(behind) => behind,
            Err(_) => return Err(Unread::NotJson),
        };
        let start = self.text.position(at) - 1;
        let (end, word) = self.name_from(at)?;
        let member = Member {
            word,
            start,
            name_end: self.text.position(end),
            end: 0,
            before: self.arranged.len() as u32,
        };
        if word <= self.object.last && !self.object.disordered {
            self.object.disordered = self.is_disordered(&member);
        }
        self.object.last = word;
        self.pending.push(member);
        self.meets(end + 1, b':').map_err(|_| Unread::NotJson)
    }

    /// Whether a name that may not be greater than the last one is not.
    #[cold]
    fn is_disordered(&self, member: &Member) -> bool {
        let last = self.pending[self.object.members as usize..].last();
        last.is_some_and(|last| {
            member.word < last.word || member.name(&self.text) <= last.name(&self.text)
        })
    }

    /// Where the name ends that begins here, and its first bytes; see [`prefix`].
    #[inline]
    fn name_from(&mut self, at: usize) -> Result<(usize, u64), Unread> {
        if let Some(word) = eight(self.body, at) {
            let found = special(word);
            if found == 0 {
                let end = plain(self.body, at + 8);
                if peek(self.body, end) == b'"' {
                    return Ok((end, word.swap_bytes()));
                }
            } else {
                let bits = found.trailing_zeros() & !7;
                if (word >> bits) as u8 == b'"' {
                    let name = word.swap_bytes() & !(u64::MAX >> bits);
                    return Ok((at + (bits / 8) as usize, name));
                }
            }
        }
        self.odd_name_from(at)
    }

    /// The same for a name with escapes, or at the end of the body.
    fn odd_name_from(&mut self, at: usize) -> Result<(usize, u64), Unread> {
        let (start, copied) = (self.text.position(at), self.text.copied());
        let end = self.string(at - 1)? - 1;
        if self.text.copied() > copied {
            // Respelled: all of it goes where the first of it went.
            self.text.leave_out(end, end);
        }
        let length = self.text.position(end) - start;
        Ok((end, prefix(self.text.from(start), length as usize)))
    }

    #[inline]
    pub(super) fn close_object(&mut self, at: usize) -> Result<(), Unread> {
        let members = self.object.members as usize;
        if self.object.disordered || self.path.len() == self.depth {
            self.arrange(at)?;
        }
        self.pending.truncate(members);
        self.object = self.around.pop().unwrap_or_default();
        Ok(())
    }

    /// Puts the members of the object that ends here in order, but for those that do not count.
    fn arrange(&mut self, at: usize) -> Result<(), Unread> {
        let object = self.object;
        let members = &mut self.pending[object.members as usize..];
        let end = self.text.position(at);
        // A member ends where the comma before the next one stands.
        let mut behind = end;
        for member in members.iter_mut().rev() {
            member.end = behind;
            behind = member.start - 1;
        }
        let is_short = end - object.start <= SHORT && self.arranged.len() == object.before as usize;
        let ignored = self.path.get(self.depth - 1).map(|step| step.ignored);
        if members.len() <= FEW && is_short && ignored.is_none() {
            insert(&self.text, members)?;
            self.text.rewrite(object.start, at, members.iter());
            return Ok(());
        }
        let order = self.sorter.sort(&self.text, members)?;
        if let Some(ignored) = ignored {
            let name = |number: &u32| members[*number as usize].name(&self.text);
            order.retain(|number| !ignored.leaves_out(name(number)));
        }
        let order = order.iter().map(|number| *number as usize);
        if is_short {
            let members = order.map(|number| &members[number]);
            self.text.rewrite(object.start, at, members);
            return Ok(());
        }
        let objects = self.arranged.len() as u32;
        let from = self.members.len() as u32;
        self.members.extend(order.map(|number| {
            let member = &members[number];
            let behind = members.get(number + 1).map_or(objects, |next| next.before);
            Part {
                text: member.start..member.end,
                objects: member.before..behind,
            }
        }));
        self.arranged.push(Arranged {
            text: object.start..end,
            members: from..self.members.len() as u32,
            before: object.before,
        });
        Ok(())
    }
}
