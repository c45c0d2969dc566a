//! The canonical text as it comes about while the body is read: the body itself for as long as
//! nothing of it has to be left out or respelled, a copy from then on.

use std::borrow::Cow;

use super::{buffer::Buffer, document::Member};

pub(super) struct Text<'a> {
    body: &'a [u8],
    /// What of the text precedes the run.
    copied: Buffer,
    /// Where in the body the run begins that goes into the text as it is.
    run: usize,
    /// How much shorter the text is than the body up to the run.
    saved: usize,
    /// The text of an object while its members are put in order.
    object: Buffer,
}

impl<'a> Text<'a> {
    pub(super) fn of(body: &'a [u8]) -> Self {
        Self {
            body,
            copied: Buffer::default(),
            run: 0,
            saved: 0,
            object: Buffer::default(),
        }
    }

    /// Where in the text this position of the body is, which is one of the run.
    #[inline]
    pub(super) fn position(&self, at: usize) -> u32 {
        (at - self.saved) as u32
    }

    /// Ends the run before this part of the body, and begins another after it.
    #[inline]
    pub(super) fn leave_out(&mut self, from: usize, to: usize) {
        if from > self.run {
            // Nothing is ever spelled longer than it was, so this suffices for all of it.
            self.copied.make_room_for(self.body.len());
            self.copied.append(self.body, self.run, from);
        }
        self.run = to;
        self.saved = to - self.copied.len();
    }

    /// Leaves this part of the body out, and puts these few bytes in its place.
    #[inline]
    pub(super) fn replace(&mut self, from: usize, to: usize, with: &[u8]) {
        self.leave_out(from, to);
        for byte in with {
            self.copied.push(*byte);
        }
        self.saved -= with.len();
    }

    /// What begins at this place of the text, as far as it is in one piece. Names are: none lies across
    /// the beginning of the run.
    #[inline]
    pub(super) fn from(&self, at: u32) -> &[u8] {
        let at = at as usize;
        match at < self.copied.len() {
            true => &self.copied.filled()[at..],
            false => &self.body[at + self.saved..],
        }
    }

    /// How much of the text precedes the run.
    pub(super) fn copied(&self) -> usize {
        self.copied.len()
    }

    /// Writes these members, with commas between them, in place of all there is from `start` on up
    /// to this position of the body.
    pub(super) fn rewrite<'m>(
        &mut self,
        start: u32,
        at: usize,
        members: impl Iterator<Item = &'m Member>,
    ) {
        let start = start as usize;
        let (from, shift) = if start >= self.copied.len() {
            // All of it stands in the run.
            let shift = self.saved;
            self.leave_out(start + shift, at);
            (self.body, shift as isize)
        } else {
            self.leave_out(at, at);
            let length = self.copied.len() - start;
            self.object.make_room_for(length);
            self.object.truncate(0);
            self.object
                .append(self.copied.filled(), start, self.copied.len());
            self.copied.truncate(start);
            (self.object.filled(), -(start as isize))
        };
        for (nth, member) in members.enumerate() {
            if nth > 0 {
                self.copied.push(b',');
            }
            let place = |at: u32| (at as isize + shift) as usize;
            self.copied
                .append(from, place(member.start), place(member.end));
        }
        self.saved = self.run - self.copied.len();
    }

    /// The whole text, once all of the body is read.
    pub(super) fn whole(mut self) -> Cow<'a, [u8]> {
        if self.copied.len() == 0 {
            return Cow::Borrowed(&self.body[self.run..]);
        }
        self.leave_out(self.body.len(), self.body.len());
        Cow::Owned(self.copied.into_bytes())
    }
}
