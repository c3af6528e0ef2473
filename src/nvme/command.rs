//! Typed forms of the commands: what their dwords 10 to 15 mean (Base 2.0, 5; NVM 1.0, 3.2).
//!
//! Each type has `parse`, which reads a submission queue entry, and `to_sqe`, which makes one. "0's based" counts are
//! converted here and nowhere else. The data pointer and the command identifier are left to whoever owns the queue.
#![forbid(unsafe_code)]

mod copy;

pub use copy::{Copy, CopyRange, CopyRange1, CopySource};

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::base::{Sqe, admin, nvm};
use super::bits::{self, bit_fields};

/// Identify (Base 5.17).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Identify {
    /// Controller or Namespace Structure, see [`super::identify::cns`].
    pub cns: u8,
    pub cntid: u16,
    /// CNS Specific Identifier.
    pub cnssid: u16,
    /// Command Set Identifier.
    pub csi: u8,
    pub uuid_index: u8,
    pub nsid: u32,
}

impl Identify {
    pub fn parse(sqe: &Sqe) -> Identify {
        let (cdw10, cdw11) = (sqe.cdw10.get().into(), sqe.cdw11.get().into());
        Identify {
            cns: bits::get(cdw10, 7, 0) as u8,
            cntid: bits::get(cdw10, 31, 16) as u16,
            cnssid: bits::get(cdw11, 15, 0) as u16,
            csi: bits::get(cdw11, 31, 24) as u8,
            uuid_index: bits::get(sqe.cdw14.get().into(), 6, 0) as u8,
            nsid: sqe.nsid.get(),
        }
    }

    pub fn to_sqe(self) -> Sqe {
        let mut sqe = Sqe::new(admin::IDENTIFY, self.nsid);
        sqe.cdw10 = (bits::set(self.cns.into(), 31, 16, self.cntid.into()) as u32).into();
        sqe.cdw11 = (bits::set(self.cnssid.into(), 31, 24, self.csi.into()) as u32).into();
        sqe.cdw14 = u32::from(self.uuid_index & 0x7F).into();
        sqe
    }
}

/// Get Log Page (Base 5.16).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GetLogPage {
    pub nsid: u32,
    /// Log Page Identifier, see [`super::log::lid`].
    pub lid: u8,
    /// Log Specific Parameter, 7 bits.
    pub lsp: u8,
    /// Retain Asynchronous Event: reading does not clear it.
    pub rae: bool,
    /// Number of dwords, not 0's based: 1 to 2^32.
    pub dwords: u64,
    /// Log Page Offset: in bytes, or an index when `ot` is set.
    pub lpo: u64,
    /// Log Specific Identifier.
    pub lsi: u16,
    /// Offset Type: `lpo` is an index.
    pub ot: bool,
    pub csi: u8,
    pub uuid_index: u8,
}

impl GetLogPage {
    pub fn parse(sqe: &Sqe) -> GetLogPage {
        let (cdw10, cdw11): (u64, u64) = (sqe.cdw10.get().into(), sqe.cdw11.get().into());
        let cdw14 = sqe.cdw14.get().into();
        let numd = bits::set(bits::get(cdw10, 31, 16), 31, 16, bits::get(cdw11, 15, 0));
        GetLogPage {
            nsid: sqe.nsid.get(),
            lid: bits::get(cdw10, 7, 0) as u8,
            lsp: bits::get(cdw10, 14, 8) as u8,
            rae: bits::get(cdw10, 15, 15) != 0,
            dwords: numd + 1,
            lpo: wide(sqe.cdw12, sqe.cdw13),
            lsi: bits::get(cdw11, 31, 16) as u16,
            ot: bits::get(cdw14, 23, 23) != 0,
            csi: bits::get(cdw14, 31, 24) as u8,
            uuid_index: bits::get(cdw14, 6, 0) as u8,
        }
    }

    pub fn to_sqe(self) -> Sqe {
        let numd = self.dwords.saturating_sub(1);
        let mut sqe = Sqe::new(admin::GET_LOG_PAGE, self.nsid);
        let cdw10 = bits::set(self.lid.into(), 14, 8, self.lsp.into());
        let cdw10 = bits::set(cdw10, 15, 15, self.rae.into());
        sqe.cdw10 = (bits::set(cdw10, 31, 16, bits::get(numd, 15, 0)) as u32).into();
        sqe.cdw11 = (bits::set(bits::get(numd, 31, 16), 31, 16, self.lsi.into()) as u32).into();
        (sqe.cdw12, sqe.cdw13) = split(self.lpo);
        let cdw14 = bits::set(u64::from(self.uuid_index & 0x7F), 23, 23, self.ot.into());
        sqe.cdw14 = (bits::set(cdw14, 31, 24, self.csi.into()) as u32).into();
        sqe
    }
}

/// Get Features and Set Features (Base 5.15 and 5.27).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Features {
    pub nsid: u32,
    /// Feature Identifier, see [`super::features::fid`].
    pub fid: u8,
    /// Select, Get only: 0 current, 1 default, 2 saved, 3 supported capabilities.
    pub sel: u8,
    /// Save, Set only.
    pub save: bool,
    /// Dword 11: the value, for most features.
    pub cdw11: u32,
}

impl Features {
    pub fn parse(sqe: &Sqe) -> Features {
        let cdw10 = sqe.cdw10.get().into();
        let set = sqe.opcode == admin::SET_FEATURES;
        Features {
            nsid: sqe.nsid.get(),
            fid: bits::get(cdw10, 7, 0) as u8,
            sel: if set { 0 } else { bits::get(cdw10, 10, 8) as u8 },
            save: set && bits::get(cdw10, 31, 31) != 0,
            cdw11: sqe.cdw11.get(),
        }
    }

    /// A Get Features command; `save` has no meaning in it.
    pub fn to_get_sqe(self) -> Sqe {
        let mut sqe = Sqe::new(admin::GET_FEATURES, self.nsid);
        sqe.cdw10 = (bits::set(self.fid.into(), 10, 8, self.sel.into()) as u32).into();
        sqe.cdw11 = self.cdw11.into();
        sqe
    }

    /// A Set Features command; `sel` has no meaning in it.
    pub fn to_set_sqe(self) -> Sqe {
        let mut sqe = Sqe::new(admin::SET_FEATURES, self.nsid);
        sqe.cdw10 = (bits::set(self.fid.into(), 31, 31, self.save.into()) as u32).into();
        sqe.cdw11 = self.cdw11.into();
        sqe
    }
}

/// Abort (Base 5.1). Dword 0 of its completion is 0 when the command was aborted, 1 when it was not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Abort {
    pub sqid: u16,
    pub cid: u16,
}

impl Abort {
    pub fn parse(sqe: &Sqe) -> Abort {
        let cdw10 = sqe.cdw10.get().into();
        Abort { sqid: bits::get(cdw10, 15, 0) as u16, cid: bits::get(cdw10, 31, 16) as u16 }
    }

    pub fn to_sqe(self) -> Sqe {
        let mut sqe = Sqe::new(admin::ABORT, 0);
        sqe.cdw10 = (bits::set(self.sqid.into(), 31, 16, self.cid.into()) as u32).into();
        sqe
    }
}

bit_fields! {
    /// Dword 12 of Read, Write, Compare, Verify and Write Zeroes (NVM figures 40, 67 and 78).
    pub struct RwDw12(u32);
    flags {
        /// Storage Tag Check.
        stc, with_stc: 24;
        /// Deallocate, Write Zeroes only.
        deac, with_deac: 25;
        /// Force Unit Access.
        fua, with_fua: 30;
        /// Limited Retry.
        lr, with_lr: 31;
    }
    fields {
        /// Number of Logical Blocks, 0's based.
        nlb, with_nlb: 15, 0;
        /// Directive Type, Write only.
        dtype, with_dtype: 23, 20;
        /// Protection Information: PRACT and PRCHK.
        prinfo, with_prinfo: 29, 26;
    }
}

/// Read, Write, Compare, Verify and Write Zeroes: a range of logical blocks and flags.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadWrite {
    pub nsid: u32,
    /// Starting LBA.
    pub slba: u64,
    /// Number of logical blocks, not 0's based: 1 to 65536.
    pub blocks: u32,
    /// Force Unit Access: durable before the completion.
    pub fua: bool,
    /// Write Zeroes: the blocks may be deallocated.
    pub deallocate: bool,
    /// PRACT and PRCHK; only meaningful for namespaces formatted with protection information.
    pub prinfo: u8,
    /// Dataset Management hints of dword 13 (access frequency, latency, sequential, incompressible).
    pub dsm: u8,
}

impl ReadWrite {
    pub fn new(nsid: u32, slba: u64, blocks: u32) -> ReadWrite {
        ReadWrite { nsid, slba, blocks, ..ReadWrite::default() }
    }

    pub fn parse(sqe: &Sqe) -> ReadWrite {
        let dw12 = RwDw12(sqe.cdw12.get());
        ReadWrite {
            nsid: sqe.nsid.get(),
            slba: wide(sqe.cdw10, sqe.cdw11),
            blocks: dw12.nlb() + 1,
            fua: dw12.fua(),
            deallocate: dw12.deac(),
            prinfo: dw12.prinfo() as u8,
            dsm: bits::get(sqe.cdw13.get().into(), 7, 0) as u8,
        }
    }

    /// `opcode` is one of [`nvm`]'s READ, WRITE, COMPARE, VERIFY, WRITE_ZEROES and WRITE_UNCORRECTABLE.
    pub fn to_sqe(self, opcode: u8) -> Sqe {
        let mut sqe = Sqe::new(opcode, self.nsid);
        (sqe.cdw10, sqe.cdw11) = split(self.slba);
        sqe.cdw12 = RwDw12(0)
            .with_nlb(self.blocks.saturating_sub(1))
            .with_fua(self.fua)
            .with_deac(self.deallocate)
            .with_prinfo(self.prinfo.into())
            .0
            .into();
        sqe.cdw13 = u32::from(self.dsm).into();
        sqe
    }
}

bit_fields! {
    /// Dword 11 of Dataset Management (NVM figure 44).
    pub struct DsmAttributes(u32);
    flags {
        /// Integral Dataset for Read.
        idr, with_idr: 0;
        /// Integral Dataset for Write.
        idw, with_idw: 1;
        /// Deallocate: the only attribute that does anything here.
        ad, with_ad: 2;
    }
    fields {}
}

/// Dataset Management (NVM 3.2.3): `ranges` [`DsmRange`]s are its data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DatasetManagement {
    pub nsid: u32,
    /// Number of ranges, not 0's based: 1 to 256.
    pub ranges: u16,
    pub attributes: DsmAttributes,
}

impl DatasetManagement {
    pub fn parse(sqe: &Sqe) -> DatasetManagement {
        DatasetManagement {
            nsid: sqe.nsid.get(),
            ranges: bits::get(sqe.cdw10.get().into(), 7, 0) as u16 + 1,
            attributes: DsmAttributes(sqe.cdw11.get()),
        }
    }

    pub fn to_sqe(self) -> Sqe {
        let mut sqe = Sqe::new(nvm::DATASET_MANAGEMENT, self.nsid);
        sqe.cdw10 = u32::from(self.ranges.saturating_sub(1) & 0xFF).into();
        sqe.cdw11 = self.attributes.0.into();
        sqe
    }
}

/// One range of a Dataset Management command (NVM figure 45), 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DsmRange {
    /// Context Attributes: hints.
    pub cattr: U32,
    /// Length in logical blocks, not 0's based; 0 is an empty range.
    pub nlb: U32,
    /// Starting LBA.
    pub slba: U64,
}

const _: () = {
    assert!(size_of::<DsmRange>() == 16);
    assert!(offset_of!(DsmRange, nlb) == 4);
    assert!(offset_of!(DsmRange, slba) == 8);
};

impl DsmRange {
    pub fn new(slba: u64, blocks: u32) -> DsmRange {
        DsmRange { cattr: 0.into(), nlb: blocks.into(), slba: slba.into() }
    }
}

fn wide(low: U32, high: U32) -> u64 {
    u64::from(low.get()) | u64::from(high.get()) << 32
}

fn split(value: u64) -> (U32, U32) {
    ((value as u32).into(), ((value >> 32) as u32).into())
}
