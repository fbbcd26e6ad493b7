//! A number for the content of a Python string or bytes. It distinguishes a code object from a
//! later one at the same address, whose strings lie at the addresses of the first one's strings.
//!
//! Python keeps the hash of any string that was looked up once, which covers all that `compile()`
//! and `exec()` make (3.10 and 3.11). Otherwise (mostly code loaded from a file, which is hardly
//! ever freed) the length, the beginning and the end are read: each stack is walked in a few
//! hundred nanoseconds.

use super::word::{mix, number, word};

/// Offsets in a string and in bytes: the length, and the hash, all bits set until Python computes
/// it.
const LENGTH: usize = 16;
const HASH: usize = 24;
/// Offset in a string: bits for the layout of its characters.
const STATE: usize = 32;
/// Further offset of a string's characters where not all are ASCII.
const WIDE: usize = 24;
/// Offset in bytes: the first byte.
const BYTES: usize = 32;

/// The number of a string, whose characters are at `characters` if all of them are ASCII.
///
/// # Safety
/// `string` is a string, of a version up to 3.11, and is kept alive.
#[inline(always)]
pub(super) unsafe fn of_string(string: usize, characters: usize) -> u64 {
    // SAFETY: the caller's promise.
    match unsafe { word(string, HASH) } as u64 {
        // SAFETY: as above.
        u64::MAX => unsafe { read_string(string, characters) },
        hash => hash,
    }
}

/// The number of a `bytes` object.
///
/// # Safety
/// `bytes` is one, and is kept alive.
#[inline(always)]
pub(super) unsafe fn of_bytes(bytes: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        match word(bytes, HASH) as u64 {
            u64::MAX => read(bytes + BYTES, word(bytes, LENGTH)),
            hash => hash,
        }
    }
}

/// # Safety
/// As `of_string`.
#[inline]
unsafe fn read_string(string: usize, characters: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        let (state, length) = (number(string, STATE), word(string, LENGTH));
        let (kind, is_compact, is_ascii) = (state >> 2 & 7, state >> 5 & 1 == 1, state >> 6 & 1);
        if !is_compact {
            // Its characters are elsewhere. No current code makes such a string.
            return length as u64;
        }
        let at = string + characters + if is_ascii == 1 { 0 } else { WIDE };
        read(at, length * kind as usize)
    }
}

/// The first 8 bytes and the last 16.
///
/// # Safety
/// `bytes` bytes at `at` may be read.
#[inline(always)]
unsafe fn read(at: usize, bytes: usize) -> u64 {
    // SAFETY: the caller's promise: each of them is within the bytes.
    let eight = |from: usize| unsafe { ((at + from) as *const u64).read_unaligned() };
    // SAFETY: as above.
    let four = |from: usize| unsafe { ((at + from) as *const u32).read_unaligned() };
    // SAFETY: as above.
    let one = |from: usize| u32::from(unsafe { ((at + from) as *const u8).read() });
    let (first, last) = match bytes {
        16.. => (eight(0) ^ eight(bytes - 16).rotate_left(23), eight(bytes - 8)),
        8.. => (eight(0), eight(bytes - 8)),
        4.. => (four(0).into(), four(bytes - 4).into()),
        1.. => ((one(0) << 8 | one(bytes / 2)).into(), one(bytes - 1).into()),
        0 => (0, 0),
    };
    mix(mix(bytes as u64, first), last)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A string of ASCII as Python keeps it up to 3.11, with this hash.
    fn string(text: &[u8], hash: u64) -> Vec<u64> {
        let mut words = vec![0, 0, text.len() as u64, hash, 1 << 2 | 1 << 5 | 1 << 6, 0];
        for part in text.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            words.push(u64::from_ne_bytes(word));
        }
        words
    }

    fn of(text: &[u8]) -> u64 {
        let words = string(text, u64::MAX);
        // SAFETY: made as Python makes them.
        unsafe { of_string(words.as_ptr() as usize, 48) }
    }

    #[test]
    fn short_texts_that_differ_in_one_character_anywhere_are_told_apart() {
        for length in [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24] {
            let text = vec![b'a'; length];
            for at in 0..length {
                let mut other = text.clone();
                other[at] = b'b';
                assert_ne!(of(&text), of(&other), "{at} of {length}");
            }
            assert_eq!(of(&text), of(&text.clone()));
        }
        assert_ne!(of(b"a"), of(b"aa"));
    }

    #[test]
    fn a_hash_that_is_known_is_taken() {
        let words = string(b"name", 77);
        // SAFETY: as above.
        assert_eq!(unsafe { of_string(words.as_ptr() as usize, 48) }, 77);
    }

    #[test]
    fn of_what_is_long_the_beginning_and_the_end_count() {
        let table = |text: &[u8]| {
            let mut words = string(text, u64::MAX);
            words.remove(4);
            words.remove(4);
            // SAFETY: laid out as bytes are.
            unsafe { of_bytes(words.as_ptr() as usize) }
        };
        let [long, mut first, mut last] = [(); 3].map(|()| vec![b'a'; 1000]);
        (first[0], last[999]) = (b'b', b'b');
        assert!(table(&long) != table(&first) && table(&long) != table(&last));
    }
}
