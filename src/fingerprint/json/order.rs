//! Puts the members of an object in the order of their names' bytes, and finds those of one name.
//!
//! Names are looked at eight bytes at a time, and each of those a few times only, however the names
//! are made: whoever writes a body cannot make this take longer than its length and the number of
//! its members warrant.

use std::{cmp::Ordering, mem, ops::Range};

use super::{document::Member, reader::Unread, text::Text};

/// Up to so many are sorted by insertion.
pub(super) const FEW: usize = 12;

/// From so many on they are sorted by digits.
const MANY: usize = 512;

/// Bits of a digit, and how many digits are looked at before what is still equal is a group of its
/// own.
const DIGIT: u32 = 11;
const DIGITS: u32 = 3;

/// The first eight bytes of a name of this length, and of what follows it, as a number that is
/// ordered like the name. A shorter name ends in zeros: no name has those, they are escaped.
#[inline]
pub(super) fn prefix(from: &[u8], length: usize) -> u64 {
    match (from.first_chunk(), length) {
        (Some(word), 8..) => u64::from_be_bytes(*word),
        (Some(word), _) => u64::from_be_bytes(*word) & !(u64::MAX >> (8 * length)),
        (None, _) => from[..length]
            .iter()
            .zip([56, 48, 40, 32, 24, 16, 8])
            .fold(0, |word, (byte, shift)| word | u64::from(*byte) << shift),
    }
}

/// Sorts, and keeps what it needs for that from object to object.
#[derive(Default)]
pub(super) struct Sorter {
    /// The numbers of the members, in order in the end.
    order: Vec<u32>,
    /// Of each member what tells its name from the others, and its place in `order`.
    keys: Vec<u64>,
    spare_keys: Vec<u64>,
    spare_order: Vec<u32>,
    /// What of `order` is still to be sorted, and how many bytes of its names are equal.
    groups: Vec<(Range<usize>, usize)>,
}

impl Sorter {
    /// The numbers of the members in the order of their names.
    pub(super) fn sort(
        &mut self,
        text: &Text<'_>,
        members: &[Member],
    ) -> Result<&mut Vec<u32>, Unread> {
        self.order.clear();
        self.order.extend(0..members.len() as u32);
        if members.len() <= FEW {
            insert_numbers(text, members, &mut self.order)?;
            return Ok(&mut self.order);
        }
        self.groups.clear();
        self.groups.push((0..members.len(), 0));
        while let Some((group, equal)) = self.groups.pop() {
            match group.len() {
                ..=FEW => insert_numbers(text, members, &mut self.order[group])?,
                _ => self.group(text, members, group, equal)?,
            }
        }
        Ok(&mut self.order)
    }

    /// Sorts a group by the bytes that follow those that are equal. What is equal in these as well
    /// is a group of its own.
    fn group(
        &mut self,
        text: &Text<'_>,
        members: &[Member],
        group: Range<usize>,
        mut equal: usize,
    ) -> Result<(), Unread> {
        let first = &members[self.order[group.start] as usize];
        let order = &mut self.order[group.clone()];
        let mut varying = take_words(&mut self.keys, text, members, order, equal);
        while varying.leading_zeros() >= 16 {
            if varying == 0 && first.name_len() < equal + 8 {
                return Err(Unread::DuplicateMember);
            }
            equal += varying.leading_zeros() as usize / 8;
            varying = take_words(&mut self.keys, text, members, order, equal);
        }
        let packing = Packing::of(varying, group.len());
        for (key, place) in self.keys.iter_mut().zip(0..) {
            *key = packing.pack(*key) | place;
        }
        if group.len() < MANY {
            self.keys.sort_unstable();
        } else {
            for digit in (packing.lowest..packing.highest).step_by(DIGIT as usize) {
                by_digit(&self.keys, &mut self.spare_keys, digit);
                mem::swap(&mut self.keys, &mut self.spare_keys);
            }
        }
        self.spare_order.clear();
        self.spare_order.extend_from_slice(order);
        for (number, key) in order.iter_mut().zip(&self.keys) {
            *number = self.spare_order[(key & packing.place) as usize];
        }
        let mut from = group.start;
        for run in self.keys.chunk_by(|a, b| (a ^ b) >> packing.lowest == 0) {
            if run.len() > 1 {
                self.groups
                    .push((from..from + run.len(), equal + packing.whole));
            }
            from += run.len();
        }
        Ok(())
    }
}

/// Takes the next eight bytes of each name, and tells in which bits they are not all the same.
fn take_words(
    words: &mut Vec<u64>,
    text: &Text<'_>,
    members: &[Member],
    order: &[u32],
    equal: usize,
) -> u64 {
    words.clear();
    let members = order.iter().map(|number| &members[*number as usize]);
    match equal {
        0 => words.extend(members.map(|member| member.word)),
        _ => words.extend(
            members.map(|member| match member.name_len().checked_sub(equal) {
                Some(length @ 1..) => prefix(text.from(member.start + 1 + equal as u32), length),
                _ => 0,
            }),
        ),
    }
    let first = words[0];
    words.iter().fold(0, |all, word| all | (word ^ first))
}

/// Sorts by insertion.
#[inline]
pub(super) fn insert(text: &Text<'_>, members: &mut [Member]) -> Result<(), Unread> {
    for next in 1..members.len() {
        let member = members[next];
        let mut place = next;
        while place > 0 && !is_before(text, &members[place - 1], &member)? {
            members[place] = members[place - 1];
            place -= 1;
        }
        members[place] = member;
    }
    Ok(())
}

/// Sorts by insertion the numbers of members.
#[inline]
fn insert_numbers(text: &Text<'_>, members: &[Member], order: &mut [u32]) -> Result<(), Unread> {
    for next in 1..order.len() {
        let number = order[next];
        let member = &members[number as usize];
        let mut place = next;
        while place > 0 && !is_before(text, &members[order[place - 1] as usize], member)? {
            order[place] = order[place - 1];
            place -= 1;
        }
        order[place] = number;
    }
    Ok(())
}

#[inline]
fn is_before(text: &Text<'_>, a: &Member, b: &Member) -> Result<bool, Unread> {
    let names = || a.name(text).cmp(b.name(text));
    match a.word.cmp(&b.word).then_with(names) {
        Ordering::Less => Ok(true),
        Ordering::Equal => Err(Unread::DuplicateMember),
        Ordering::Greater => Ok(false),
    }
}

/// Sorts by the digit that begins at this bit; what is equal in it keeps its order.
fn by_digit(keys: &[u64], sorted: &mut Vec<u64>, bit: u32) {
    let digit = |key: &u64| (key >> bit) as usize & ((1 << DIGIT) - 1);
    let mut places = [0_u32; 1 << DIGIT];
    for key in keys {
        places[digit(key)] += 1;
    }
    let mut before = 0;
    for place in &mut places {
        before += mem::replace(place, before);
    }
    sorted.resize(keys.len(), 0);
    for key in keys {
        let place = &mut places[digit(key)];
        sorted[*place as usize] = *key;
        *place += 1;
    }
}

/// How words are made shorter without changing their order: of each byte only the bits stay that
/// not all words share, and below them there is room for a member's place.
struct Packing {
    /// Bits of each byte that stay.
    width: u32,
    /// The bits that hold the place.
    place: u64,
    /// The bits that are looked at.
    lowest: u32,
    highest: u32,
    /// How many of the bytes are looked at.
    whole: usize,
}

impl Packing {
    fn of(varying: u64, members: usize) -> Self {
        let widths = varying.to_be_bytes().map(|byte| 8 - byte.leading_zeros());
        let width = widths.into_iter().fold(1, u32::max);
        let room = usize::BITS - members.leading_zeros();
        let mut packing = Self {
            width,
            place: (1 << room) - 1,
            lowest: room,
            highest: 0,
            whole: 0,
        };
        packing.highest = 64 - packing.pack(varying).leading_zeros();
        if members >= MANY {
            let digits = DIGIT * DIGITS;
            packing.lowest = room.max(packing.highest.saturating_sub(digits));
        }
        packing.whole = ((64 - packing.lowest) / width).min(8) as usize;
        packing
    }

    #[inline]
    fn pack(&self, word: u64) -> u64 {
        let width = self.width;
        let ones = u64::from_ne_bytes([1; 8]) * ((1 << width) - 1);
        let word = word & ones;
        let word = (word & 0x00FF_00FF_00FF_00FF) | (word & 0xFF00_FF00_FF00_FF00) >> (8 - width);
        let word =
            (word & 0x0000_FFFF_0000_FFFF) | (word & 0xFFFF_0000_FFFF_0000) >> (16 - 2 * width);
        let word = (word & 0xFFFF_FFFF) | (word & 0xFFFF_FFFF_0000_0000) >> (32 - 4 * width);
        (word << (64 - 8 * width)) & !self.place
    }
}
