//! A document that was read: its text, and where members go elsewhere than they stand.

use std::{borrow::Cow, ops::Range};

use super::{buffer::Backwards, text::Text};

/// A member of an object that is being read. Positions are those of the text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member {
    /// The first bytes of its name; see [`prefix`](super::order::prefix).
    pub(super) word: u64,
    /// Its opening quote.
    pub(super) start: u32,
    /// The quote that ends its name.
    pub(super) name_end: u32,
    /// Behind its value. Known once its object has ended.
    pub(super) end: u32,
    /// How many arranged objects end before it begins.
    pub(super) before: u32,
}

impl Member {
    #[inline]
    pub(super) fn name<'t>(&self, text: &'t Text<'_>) -> &'t [u8] {
        &text.from(self.start + 1)[..self.name_len()]
    }

    #[inline]
    pub(super) fn name_len(&self) -> usize {
        (self.name_end - self.start) as usize - 1
    }
}

/// A part of the text, and the arranged objects in it.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) text: Range<u32>,
    pub(super) objects: Range<u32>,
}

/// An object whose members go out elsewhere than they stand.
#[derive(Debug)]
pub(super) struct Arranged {
    /// What is between its braces.
    pub(super) text: Range<u32>,
    /// What goes out instead.
    pub(super) members: Range<u32>,
    /// How many arranged objects end before it begins. What is between those and itself stands in
    /// it.
    pub(super) before: u32,
}

pub(super) struct Document<'a> {
    /// Canonical but for the arranged objects.
    pub(super) text: Cow<'a, [u8]>,
    /// In the order in which they end.
    pub(super) arranged: Vec<Arranged>,
    /// Their members, object by object.
    pub(super) members: Vec<Part>,
}

impl<'a> Document<'a> {
    pub(super) fn canonical(self) -> Canonical<'a> {
        if self.arranged.is_empty() {
            return Canonical::AsItStands(self.text);
        }
        let mut out = Backwards::of(self.text.len());
        let all = Part {
            text: 0..self.text.len() as u32,
            objects: 0..self.arranged.len() as u32,
        };
        self.write(&mut out, &all);
        Canonical::Arranged(out)
    }

    /// Writes a part of the text, from its end to its beginning: that way the objects in it are
    /// found one after the other. As deep as objects stand in each other.
    fn write(&self, out: &mut Backwards, part: &Part) {
        let (mut end, mut objects) = (part.text.end, part.objects.end);
        while objects > part.objects.start {
            let object = &self.arranged[objects as usize - 1];
            out.put(&self.text, object.text.end as usize, end as usize);
            let members = object.members.start as usize..object.members.end as usize;
            for (nth, member) in self.members[members].iter().rev().enumerate() {
                if nth > 0 {
                    out.comma();
                }
                if member.objects.is_empty() {
                    out.put(
                        &self.text,
                        member.text.start as usize,
                        member.text.end as usize,
                    );
                } else {
                    self.write(out, member);
                }
            }
            (end, objects) = (object.text.start, object.before);
        }
        out.put(&self.text, part.text.start as usize, end as usize);
    }
}

/// The canonical text.
pub(super) enum Canonical<'a> {
    AsItStands(Cow<'a, [u8]>),
    Arranged(Backwards),
}

impl Canonical<'_> {
    pub(super) fn as_bytes(&self) -> &[u8] {
        match self {
            Self::AsItStands(text) => text,
            Self::Arranged(out) => out.written(),
        }
    }
}
