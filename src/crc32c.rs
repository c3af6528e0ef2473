//! CRC-32C (Castagnoli): the checksum of every block, journal record and send stream, and the digest of NVMe/TCP
//! (TCP transport specification 1.0, section 3.3.1.1).
#![forbid(unsafe_code)]

use crc_fast::{CrcAlgorithm, Digest};

/// The checksum of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The checksum of what `crc` is the checksum of, with `bytes` after it.
pub fn append(crc: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    #[test]
    fn vectors_of_rfc_3720() {
        let rising: Vec<u8> = (0..32).collect();
        let falling: Vec<u8> = (0..32).rev().collect();
        let vectors: [(&[u8], u32); 5] = [
            (&[0; 32], 0x8A91_36AA),
            (&[0xFF; 32], 0x62A8_AB43),
            (&rising, 0x46DD_794E),
            (&falling, 0x113F_DB5C),
            (b"123456789", 0xE306_9283),
        ];
        for (bytes, crc) in vectors {
            assert_eq!(super::crc32c(bytes), crc);
        }
        assert_eq!(super::crc32c(&[]), 0);
    }

    proptest! {
        /// Each length and alignment takes another way through the instructions: all agree with another crate.
        #[test]
        fn agrees_in_one_go_and_in_parts(
            bytes in proptest::collection::vec(any::<u8>(), 0..9000),
            from in 0_usize..64,
            at in 0_usize..9000,
        ) {
            let bytes = &bytes[from.min(bytes.len())..];
            let (a, b) = bytes.split_at(at.min(bytes.len()));
            let whole = crc32c::crc32c(bytes);
            prop_assert_eq!(super::crc32c(bytes), whole);
            prop_assert_eq!(super::append(super::crc32c(a), b), whole);
        }
    }
}
