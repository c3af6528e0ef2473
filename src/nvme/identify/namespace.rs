//! Identify data structures of namespaces, and the lists (Base 2.0, 5.17.2; NVM 1.0, 4.1.5).
#![forbid(unsafe_code)]

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::nvme::bits::bit_fields;
use crate::nvme::log::U128;

/// Identify Namespace of the NVM command set, CNS 00h (NVM figure 97), 4096 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IdentifyNamespace {
    /// Namespace Size, logical blocks.
    pub nsze: U64,
    /// Namespace Capacity, logical blocks.
    pub ncap: U64,
    /// Namespace Utilization, logical blocks.
    pub nuse: U64,
    /// Namespace Features, see [`Nsfeat`].
    pub nsfeat: u8,
    /// Number of LBA Formats, 0's based.
    pub nlbaf: u8,
    /// Formatted LBA Size: index of the format in bits 3:0.
    pub flbas: u8,
    pub mc: u8,
    pub dpc: u8,
    pub dps: u8,
    /// Namespace Multi-path I/O and Sharing: bit 0 = may be attached to several controllers.
    pub nmic: u8,
    /// Reservation Capabilities.
    pub rescap: u8,
    pub fpi: u8,
    /// Deallocate Logical Block Features, see [`Dlfeat`].
    pub dlfeat: u8,
    pub nawun: U16,
    pub nawupf: U16,
    pub nacwu: U16,
    pub nabsn: U16,
    pub nabo: U16,
    pub nabspf: U16,
    /// Optimal I/O Boundary, logical blocks.
    pub noiob: U16,
    /// NVM Capacity, bytes.
    pub nvmcap: U128,
    /// Preferred Write Granularity, logical blocks, 0's based.
    pub npwg: U16,
    /// Preferred Write Alignment, 0's based.
    pub npwa: U16,
    /// Preferred Deallocate Granularity, 0's based.
    pub npdg: U16,
    /// Preferred Deallocate Alignment, 0's based.
    pub npda: U16,
    /// Optimal Write Size, 0's based; 0 with NPWG set is one block.
    pub nows: U16,
    pub mssrl: U16,
    pub mcl: U32,
    pub msrc: u8,
    pub rsvd81: [u8; 11],
    /// ANA Group Identifier.
    pub anagrpid: U32,
    pub rsvd96: [u8; 3],
    /// Namespace Attributes: bit 0 = write protected.
    pub nsattr: u8,
    pub nvmsetid: U16,
    pub endgid: U16,
    /// Namespace Globally Unique Identifier, big endian.
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    pub lbaf: [LbaFormat; 64],
    pub vs: [u8; 3712],
}

const _: () = {
    assert!(size_of::<IdentifyNamespace>() == 4096);
    assert!(offset_of!(IdentifyNamespace, nsze) == 0);
    assert!(offset_of!(IdentifyNamespace, ncap) == 8);
    assert!(offset_of!(IdentifyNamespace, nuse) == 16);
    assert!(offset_of!(IdentifyNamespace, nsfeat) == 24);
    assert!(offset_of!(IdentifyNamespace, nlbaf) == 25);
    assert!(offset_of!(IdentifyNamespace, flbas) == 26);
    assert!(offset_of!(IdentifyNamespace, mc) == 27);
    assert!(offset_of!(IdentifyNamespace, dpc) == 28);
    assert!(offset_of!(IdentifyNamespace, dps) == 29);
    assert!(offset_of!(IdentifyNamespace, nmic) == 30);
    assert!(offset_of!(IdentifyNamespace, rescap) == 31);
    assert!(offset_of!(IdentifyNamespace, fpi) == 32);
    assert!(offset_of!(IdentifyNamespace, dlfeat) == 33);
    assert!(offset_of!(IdentifyNamespace, nawun) == 34);
    assert!(offset_of!(IdentifyNamespace, nawupf) == 36);
    assert!(offset_of!(IdentifyNamespace, nacwu) == 38);
    assert!(offset_of!(IdentifyNamespace, nabsn) == 40);
    assert!(offset_of!(IdentifyNamespace, nabo) == 42);
    assert!(offset_of!(IdentifyNamespace, nabspf) == 44);
    assert!(offset_of!(IdentifyNamespace, noiob) == 46);
    assert!(offset_of!(IdentifyNamespace, nvmcap) == 48);
    assert!(offset_of!(IdentifyNamespace, npwg) == 64);
    assert!(offset_of!(IdentifyNamespace, npwa) == 66);
    assert!(offset_of!(IdentifyNamespace, npdg) == 68);
    assert!(offset_of!(IdentifyNamespace, npda) == 70);
    assert!(offset_of!(IdentifyNamespace, nows) == 72);
    assert!(offset_of!(IdentifyNamespace, mssrl) == 74);
    assert!(offset_of!(IdentifyNamespace, mcl) == 76);
    assert!(offset_of!(IdentifyNamespace, msrc) == 80);
    assert!(offset_of!(IdentifyNamespace, anagrpid) == 92);
    assert!(offset_of!(IdentifyNamespace, nsattr) == 99);
    assert!(offset_of!(IdentifyNamespace, nvmsetid) == 100);
    assert!(offset_of!(IdentifyNamespace, endgid) == 102);
    assert!(offset_of!(IdentifyNamespace, nguid) == 104);
    assert!(offset_of!(IdentifyNamespace, eui64) == 120);
    assert!(offset_of!(IdentifyNamespace, lbaf) == 128);
    assert!(offset_of!(IdentifyNamespace, vs) == 384);
};

impl IdentifyNamespace {
    /// The LBA format in use (NVM 4.1.5.1): FLBAS bits 6:5 are the index's upper bits when there are more than 16 formats.
    pub fn format(&self) -> LbaFormat {
        let flbas = Flbas(self.flbas);
        let upper = if self.nlbaf > 15 { flbas.index_upper() } else { 0 };
        self.lbaf[usize::from(upper << 4 | flbas.index())]
    }

    /// Bytes of one logical block, metadata not counted; `None` when LBADS is below 9 (a block below 512 bytes is not
    /// allowed) or absurd.
    pub fn block_bytes(&self) -> Option<u32> {
        let lbads = self.format().lbads;
        (9..=31).contains(&lbads).then(|| 1 << lbads)
    }
}

bit_fields! {
    /// FLBAS (NVM figure 97).
    pub struct Flbas(u8);
    flags {
        /// Metadata is sent at the end of the data.
        extended, with_extended: 4;
    }
    fields {
        index, with_index: 3, 0;
        index_upper, with_index_upper: 6, 5;
    }
}

bit_fields! {
    /// NSFEAT (NVM figure 97).
    pub struct Nsfeat(u8);
    flags {
        /// Thin provisioned: NUSE tells the truth.
        thinp, with_thinp: 0;
        /// NAWUN, NAWUPF and NACWU apply.
        nsabp, with_nsabp: 1;
        /// Deallocated or Unwritten Logical Block error.
        dae, with_dae: 2;
        /// NGUID and EUI64 are never used again.
        uidreuse, with_uidreuse: 3;
        /// NPWG, NPWA, NPDG, NPDA and NOWS are valid.
        optperf, with_optperf: 4;
    }
    fields {}
}

bit_fields! {
    /// DLFEAT (NVM figure 97).
    pub struct Dlfeat(u8);
    flags {
        /// Write Zeroes may deallocate.
        write_zeroes_deallocates, with_write_zeroes_deallocates: 3;
    }
    fields {
        /// What a deallocated block reads as: 0 not said, 1 zeros, 2 ones.
        reads_as, with_reads_as: 2, 0;
    }
}

/// An LBA Format (NVM figure 98), 4 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LbaFormat {
    /// Metadata Size, bytes per block.
    pub ms: U16,
    /// LBA Data Size as a power of two: 9 or more.
    pub lbads: u8,
    /// Relative Performance, 0 best to 3.
    pub rp: u8,
}

const _: () = assert!(size_of::<LbaFormat>() == 4);

/// I/O Command Set specific Identify Controller for NVM, CNS 06h CSI 00h (NVM figure 102), 4096 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NvmController {
    /// Verify Size Limit, power of two of the minimum page; 0 is no limit.
    pub vsl: u8,
    /// Write Zeroes Size Limit.
    pub wzsl: u8,
    /// Write Uncorrectable Size Limit.
    pub wusl: u8,
    /// Dataset Management Ranges Limit; 0 is none.
    pub dmrl: u8,
    /// Dataset Management Range Size Limit, logical blocks.
    pub dmrsl: U32,
    /// Dataset Management Size Limit, logical blocks.
    pub dmsl: U64,
    pub rsvd16: [u8; 4080],
}

const _: () = {
    assert!(size_of::<NvmController>() == 4096);
    assert!(offset_of!(NvmController, dmrl) == 3);
    assert!(offset_of!(NvmController, dmrsl) == 4);
    assert!(offset_of!(NvmController, dmsl) == 8);
};

/// I/O Command Set specific Identify Namespace for NVM, CNS 05h CSI 00h (NVM figure 100), 4096 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NvmNamespace {
    /// Logical Block Storage Tag Mask.
    pub lbstm: U64,
    /// Protection Information Capabilities.
    pub pic: u8,
    pub rsvd9: [u8; 3],
    /// Extended LBA formats.
    pub elbaf: [U32; 64],
    pub rsvd268: [u8; 3828],
}

const _: () = {
    assert!(size_of::<NvmNamespace>() == 4096);
    assert!(offset_of!(NvmNamespace, pic) == 8);
    assert!(offset_of!(NvmNamespace, elbaf) == 12);
};

/// I/O Command Set Independent Identify Namespace, CNS 08h (Base figure 280), 4096 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IndependentNamespace {
    pub nsfeat: u8,
    pub nmic: u8,
    pub rescap: u8,
    pub fpi: u8,
    pub anagrpid: U32,
    /// Bit 0 = write protected.
    pub nsattr: u8,
    pub rsvd9: u8,
    pub nvmsetid: U16,
    pub endgid: U16,
    /// Namespace Status: bit 0 = ready.
    pub nstat: u8,
    pub rsvd15: [u8; 4081],
}

const _: () = {
    assert!(size_of::<IndependentNamespace>() == 4096);
    assert!(offset_of!(IndependentNamespace, anagrpid) == 4);
    assert!(offset_of!(IndependentNamespace, nsattr) == 8);
    assert!(offset_of!(IndependentNamespace, nvmsetid) == 10);
    assert!(offset_of!(IndependentNamespace, nstat) == 14);
};

/// A list of namespace IDs in rising order, zero filled, CNS 02h and 07h (Base 4.4), 4096 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NamespaceList {
    pub nsids: [U32; 1024],
}

const _: () = {
    assert!(size_of::<NamespaceList>() == 4096);
    assert!(offset_of!(NamespaceList, nsids) == 0);
};

/// A Controller List, CNS 12h and 13h (Base 4.4.1), 4096 bytes: how many, then that many identifiers in rising order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ControllerList {
    pub count: U16,
    pub cntlids: [U16; 2047],
}

const _: () = {
    assert!(size_of::<ControllerList>() == 4096);
    assert!(offset_of!(ControllerList, count) == 0);
    assert!(offset_of!(ControllerList, cntlids) == 2);
};

/// The list of supported combinations of I/O command sets, CNS 1Ch (Base figure 287), 4096 bytes: each entry is a bit
/// mask of CSIs, a zero entry ends the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CommandSetList {
    pub combinations: [U64; 512],
}

const _: () = assert!(size_of::<CommandSetList>() == 4096);

/// The header of a Namespace Identification Descriptor, CNS 03h (Base figure 278), 4 bytes; `nidl` bytes follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DescriptorHeader {
    /// Namespace Identifier Type, see [`nidt`]; 0 ends the list.
    pub nidt: u8,
    /// Namespace Identifier Length, bytes.
    pub nidl: u8,
    pub rsvd2: [u8; 2],
}

const _: () = assert!(size_of::<DescriptorHeader>() == 4);

/// Namespace Identifier Types (Base figure 278).
pub mod nidt {
    pub const EUI64: u8 = 1;
    pub const NGUID: u8 = 2;
    pub const UUID: u8 = 3;
    pub const CSI: u8 = 4;

    /// The length that a descriptor of this type must have, `None` for an unknown type.
    pub const fn len(nidt: u8) -> Option<u8> {
        match nidt {
            EUI64 => Some(8),
            NGUID | UUID => Some(16),
            CSI => Some(1),
            _ => None,
        }
    }
}

/// The descriptors in a CNS 03h page, as (type, value). Ends at the terminator, at the end of the page, or at the first
/// descriptor that does not fit: the page comes from the peer.
pub fn descriptors(page: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut rest = page;
    std::iter::from_fn(move || {
        let (header, body) = DescriptorHeader::read_from_prefix(rest).ok()?;
        if header.nidt == 0 || header.nidl == 0 {
            return None;
        }
        let (value, after) = body.split_at_checked(header.nidl.into())?;
        rest = after;
        Some((header.nidt, value))
    })
}

/// A CNS 03h page with these descriptors, zero filled. Values longer than 255 bytes and descriptors beyond the page
/// are left out.
pub fn descriptor_page<'a>(list: impl IntoIterator<Item = (u8, &'a [u8])>) -> Box<[u8; super::IDENTIFY_LEN]> {
    let mut page = Box::new([0; super::IDENTIFY_LEN]);
    let mut at = 0;
    for (nidt, value) in list {
        let Ok(nidl) = u8::try_from(value.len()) else { continue };
        let end = at + size_of::<DescriptorHeader>() + value.len();
        if end > page.len() {
            break;
        }
        let header = DescriptorHeader { nidt, nidl, rsvd2: [0; 2] };
        page[at..at + size_of::<DescriptorHeader>()].copy_from_slice(header.as_bytes());
        page[at + size_of::<DescriptorHeader>()..end].copy_from_slice(value);
        at = end;
    }
    page
}
