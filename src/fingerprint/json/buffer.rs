//! Bytes that are put together from many short parts.

/// Short parts are copied at this length, whatever theirs is: that is one load and one store.
const SHORT: usize = 16;

/// Bytes of which the first are filled. Once there is room for any, there is room for a short part
/// more.
#[derive(Default)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    length: usize,
}

impl Buffer {
    #[inline]
    pub(super) fn make_room_for(&mut self, length: usize) {
        if self.bytes.len() < length + SHORT {
            self.bytes.resize(length + SHORT, 0);
        }
    }

    #[inline]
    pub(super) fn push(&mut self, byte: u8) {
        self.bytes[self.length] = byte;
        self.length += 1;
    }

    #[inline]
    pub(super) fn append(&mut self, from: &[u8], start: usize, end: usize) {
        let length = end - start;
        let to = &mut self.bytes[self.length..];
        match (from[start..].first_chunk(), to.first_chunk_mut::<SHORT>()) {
            (Some(chunk), Some(to)) if length <= SHORT => *to = *chunk,
            _ => to[..length].copy_from_slice(&from[start..end]),
        }
        self.length += length;
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.length
    }

    #[inline]
    pub(super) fn truncate(&mut self, length: usize) {
        self.length = length;
    }

    #[inline]
    pub(super) fn filled(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    pub(super) fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.truncate(self.length);
        self.bytes
    }
}

/// Bytes that are written from their end on.
pub(super) struct Backwards {
    bytes: Vec<u8>,
    start: usize,
}

impl Backwards {
    pub(super) fn of(length: usize) -> Self {
        Self {
            bytes: vec![0; length + SHORT],
            start: length + SHORT,
        }
    }

    #[inline]
    pub(super) fn comma(&mut self) {
        self.start -= 1;
        self.bytes[self.start] = b',';
    }

    #[inline]
    pub(super) fn put(&mut self, from: &[u8], start: usize, end: usize) {
        let length = end - start;
        let to = &mut self.bytes[..self.start];
        match (from[..end].last_chunk(), to.last_chunk_mut::<SHORT>()) {
            (Some(chunk), Some(to)) if length <= SHORT => *to = *chunk,
            _ => {
                let place = self.start - length;
                to[place..].copy_from_slice(&from[start..end]);
            }
        }
        self.start -= length;
    }

    pub(super) fn written(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}
