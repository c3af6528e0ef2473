//! Copy: ranges of blocks to another place of the same namespace (NVM 1.0, 3.2.2).
#![forbid(unsafe_code)]

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{split, wide};
use crate::nvme::base::{Sqe, nvm};
use crate::nvme::bits;

/// The Copy command: its data is a list of `ranges` source ranges, which are copied one after the other to `sdlba` on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copy {
    pub nsid: u32,
    /// Starting Destination LBA.
    pub sdlba: u64,
    /// Number of Ranges, not 0's based: 1 to 256.
    pub ranges: u16,
    /// Descriptor Format of the list: 0 is [`CopyRange`], 1 is [`CopyRange1`].
    pub format: u8,
    /// Force Unit Access: durable before the completion.
    pub fua: bool,
}

/// A source range, whatever its format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopySource {
    pub slba: u64,
    /// Number of logical blocks, not 0's based: 1 to 65536.
    pub blocks: u32,
}

impl Copy {
    pub fn parse(sqe: &Sqe) -> Copy {
        let cdw12 = sqe.cdw12.get().into();
        Copy {
            nsid: sqe.nsid.get(),
            sdlba: wide(sqe.cdw10, sqe.cdw11),
            ranges: bits::get(cdw12, 7, 0) as u16 + 1,
            format: bits::get(cdw12, 11, 8) as u8,
            fua: bits::get(cdw12, 30, 30) != 0,
        }
    }

    pub fn to_sqe(self) -> Sqe {
        let mut sqe = Sqe::new(nvm::COPY, self.nsid);
        (sqe.cdw10, sqe.cdw11) = split(self.sdlba);
        let cdw12 = bits::set(u64::from(self.ranges.saturating_sub(1) & 0xFF), 11, 8, self.format.into());
        sqe.cdw12 = (bits::set(cdw12, 30, 30, self.fua.into()) as u32).into();
        sqe
    }

    /// Bytes of one entry of the list; `None` for a format that this crate does not know.
    pub fn entry_len(&self) -> Option<u32> {
        match self.format {
            0 => Some(size_of::<CopyRange>() as u32),
            1 => Some(size_of::<CopyRange1>() as u32),
            _ => None,
        }
    }

    /// The sources in `list`; `None` when it is too short for them.
    pub fn sources<'a>(&self, list: &'a [u8]) -> Option<impl Iterator<Item = CopySource> + 'a> {
        let entry = self.entry_len()? as usize;
        let list = list.get(..usize::from(self.ranges) * entry)?;
        // SLBA and NLB stand at the same place in both formats.
        Some(list.chunks_exact(entry).filter_map(|entry| {
            let (range, _) = CopyRange::ref_from_prefix(entry).ok()?;
            Some(CopySource { slba: range.slba.get(), blocks: u32::from(range.nlb.get()) + 1 })
        }))
    }
}

/// A source range of format 0 (NVM figure 39), 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CopyRange {
    pub rsvd0: U64,
    /// Starting LBA.
    pub slba: U64,
    /// Number of Logical Blocks, 0's based.
    pub nlb: U16,
    pub rsvd18: [u8; 6],
    /// Expected Initial Logical Block Reference Tag.
    pub eilbrt: U32,
    /// Expected Logical Block Application Tag, and its mask.
    pub elbat: U16,
    pub elbatm: U16,
}

/// A source range of format 1 (NVM figure 40), with room for larger tags, 40 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CopyRange1 {
    pub rsvd0: U64,
    pub slba: U64,
    pub nlb: U16,
    pub rsvd18: [u8; 8],
    /// Expected Logical Block Storage Tag and Expected Initial Logical Block Reference Tag.
    pub elbt: [u8; 10],
    pub elbat: U16,
    pub elbatm: U16,
}

const _: () = {
    assert!(size_of::<CopyRange>() == 32);
    assert!(offset_of!(CopyRange, slba) == 8);
    assert!(offset_of!(CopyRange, nlb) == 16);
    assert!(offset_of!(CopyRange, eilbrt) == 24);
    assert!(size_of::<CopyRange1>() == 40);
    assert!(offset_of!(CopyRange1, slba) == offset_of!(CopyRange, slba));
    assert!(offset_of!(CopyRange1, nlb) == offset_of!(CopyRange, nlb));
    assert!(offset_of!(CopyRange1, elbt) == 26);
    assert!(offset_of!(CopyRange1, elbat) == 36);
};

impl CopyRange {
    /// `blocks` is not 0's based: 1 to 65536.
    pub fn new(slba: u64, blocks: u32) -> CopyRange {
        CopyRange {
            rsvd0: 0.into(),
            slba: slba.into(),
            nlb: (blocks.saturating_sub(1) as u16).into(),
            rsvd18: [0; 6],
            eilbrt: 0.into(),
            elbat: 0.into(),
            elbatm: 0.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_laid_out_as_the_figures_say() {
        let command = Copy { nsid: 7, sdlba: 0x1_2345_6789, ranges: 3, format: 1, fua: true };
        let sqe = command.to_sqe();
        let bytes = sqe.as_bytes();
        assert_eq!((bytes[0], &bytes[4..8]), (0x19, &[7, 0, 0, 0][..]));
        assert_eq!(bytes[40..52], [0x89, 0x67, 0x45, 0x23, 1, 0, 0, 0, 2, 1, 0, 0x40]);
        assert_eq!(Copy::parse(&sqe), command);
        assert_eq!(Copy { format: 2, ..command }.entry_len(), None);
    }

    #[test]
    fn sources_are_read_in_both_formats() {
        for format in [0, 1] {
            let command = Copy { ranges: 2, format, ..Copy::default() };
            let entry = command.entry_len().unwrap() as usize;
            let mut list = vec![0xFF; 2 * entry];
            for (i, (slba, nlb)) in [(5u64, 0u16), (1 << 40, 0xFFFF)].into_iter().enumerate() {
                list[i * entry + 8..][..8].copy_from_slice(&slba.to_le_bytes());
                list[i * entry + 16..][..2].copy_from_slice(&nlb.to_le_bytes());
            }
            let found: Vec<_> = command.sources(&list).unwrap().collect();
            let expected = [(5, 1), (1 << 40, 65536)].map(|(slba, blocks)| CopySource { slba, blocks });
            assert_eq!(found, expected);
            assert!(command.sources(&list[1..]).is_none());
        }
        let range = CopyRange::new(9, 65536);
        assert_eq!((range.slba.get(), range.nlb.get()), (9, 0xFFFF));
    }
}
