//! Block contents that can be checked: every byte follows from (seed, block number, version).
//!
//! ```text
//!   word 0: version      word 1: block number      word n: mix(seed, block number, version, n)
//! ```
//!
//! The first two words are in the clear, so that a wrong block says whose it is: an old version (a lost write), another
//! block's (misplaced), or noise (damaged). Words are 8 bytes, little endian.
#![forbid(unsafe_code)]

use serde::Serialize;

/// The seed of a run's patterns.
#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    pub seed: u64,
}

/// A block whose content is not what was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Mismatch {
    /// The block, counted in units of the pattern.
    pub block: u64,
    /// The version that should be there.
    pub expected: u64,
    /// The version and the block number that stand there.
    pub found_version: u64,
    pub found_block: u64,
    /// The first byte that differs.
    pub byte: usize,
}

impl Pattern {
    /// Fills one block; its length is a multiple of 8.
    pub fn fill(self, block: u64, version: u64, buf: &mut [u8]) {
        for (n, word) in buf.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&self.word(block, version, n).to_le_bytes());
        }
    }

    /// Checks one block against the version that should be there.
    pub fn check(self, block: u64, version: u64, buf: &[u8]) -> Result<(), Mismatch> {
        let wrong = buf
            .chunks_exact(8)
            .enumerate()
            .find(|&(n, word)| word != self.word(block, version, n).to_le_bytes());
        let Some((n, word)) = wrong else { return Ok(()) };
        let expected = self.word(block, version, n).to_le_bytes();
        let at = word.iter().zip(expected).position(|(&found, wanted)| found != wanted).unwrap_or(0);
        Err(Mismatch {
            block,
            expected: version,
            found_version: read_word(buf, 0),
            found_block: read_word(buf, 1),
            byte: n * 8 + at,
        })
    }

    /// Checks a block of which no version is known: it must be whole. Returns its version, or 0 for a block of zeros,
    /// which was never written.
    pub fn check_any(self, block: u64, buf: &[u8]) -> Result<u64, Mismatch> {
        if buf.iter().all(|&b| b == 0) {
            return Ok(0);
        }
        let version = read_word(buf, 0);
        self.check(block, version, buf).map(|()| version)
    }

    fn word(self, block: u64, version: u64, n: usize) -> u64 {
        match n {
            0 => version,
            1 => block,
            n => mix(self.seed ^ mix(block ^ mix(version)) ^ n as u64),
        }
    }
}

fn read_word(buf: &[u8], n: usize) -> u64 {
    buf.get(n * 8..).and_then(|rest| rest.first_chunk::<8>()).map_or(0, |word| u64::from_le_bytes(*word))
}

/// The finaliser of SplitMix64: every bit of the input reaches every bit of the output.
pub(super) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_byte_is_found_and_named() {
        let pattern = Pattern { seed: 9 };
        let mut block = [0; 512];
        pattern.fill(7, 3, &mut block);
        assert_eq!(pattern.check(7, 3, &block), Ok(()));
        assert_eq!(pattern.check_any(7, &block), Ok(3));
        for byte in 0..512 {
            let mut damaged = block;
            damaged[byte] ^= 0x10;
            assert_eq!(pattern.check(7, 3, &damaged).unwrap_err().byte, byte);
            assert!(pattern.check_any(7, &damaged).is_err(), "byte {byte}");
        }
    }

    #[test]
    fn old_and_misplaced_blocks_say_what_they_are() {
        let pattern = Pattern { seed: 9 };
        let mut block = [0; 64];
        pattern.fill(7, 3, &mut block);
        let old = pattern.check(7, 4, &block).unwrap_err();
        assert_eq!((old.expected, old.found_version, old.found_block), (4, 3, 7));
        let misplaced = pattern.check(8, 3, &block).unwrap_err();
        assert_eq!((misplaced.block, misplaced.found_block, misplaced.byte), (8, 7, 8));
        assert!(Pattern { seed: 10 }.check(7, 3, &block).is_err());
        assert_eq!(pattern.check_any(7, &[0; 64]), Ok(0));
    }
}
