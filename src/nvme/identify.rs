//! Identify data structures (Base 2.0, 5.17.2; NVM 1.0, 4.1.5): the controller here, namespaces in [`namespace`].
#![forbid(unsafe_code)]

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::bits::bit_fields;
use super::log::U128;
use super::nqn::NQN_FIELD_LEN;

mod namespace;

pub use namespace::*;

/// Every Identify data structure has this size in bytes.
pub const IDENTIFY_LEN: usize = 4096;

/// Controller or Namespace Structure: what Identify returns (Base figure 273).
pub mod cns {
    pub const NAMESPACE: u8 = 0x00;
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespace IDs above the command's NSID.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    pub const NVM_SETS: u8 = 0x04;
    /// I/O command set specific namespace.
    pub const CSI_NAMESPACE: u8 = 0x05;
    /// I/O command set specific controller.
    pub const CSI_CONTROLLER: u8 = 0x06;
    pub const CSI_ACTIVE_NAMESPACES: u8 = 0x07;
    /// I/O command set independent namespace.
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    pub const ALLOCATED_NAMESPACES: u8 = 0x10;
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    pub const ATTACHED_CONTROLLERS: u8 = 0x12;
    pub const CONTROLLERS: u8 = 0x13;
    /// The same as 07h and 05h, of allocated namespaces.
    pub const CSI_ALLOCATED_NAMESPACES: u8 = 0x1A;
    pub const CSI_ALLOCATED_NAMESPACE: u8 = 0x1B;
    pub const COMMAND_SETS: u8 = 0x1C;
}

/// Command Set Identifiers (Base figure 274).
pub mod csi {
    pub const NVM: u8 = 0x00;
    pub const KEY_VALUE: u8 = 0x01;
    pub const ZONED: u8 = 0x02;
}

/// Identify Controller, CNS 01h (Base figure 275), 4096 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IdentifyController {
    /// PCI Vendor ID; 0 when there is none.
    pub vid: U16,
    pub ssvid: U16,
    /// Serial Number, ASCII, space padded.
    pub sn: [u8; 20],
    /// Model Number, ASCII, space padded.
    pub mn: [u8; 40],
    /// Firmware Revision, ASCII, space padded.
    pub fr: [u8; 8],
    /// Recommended Arbitration Burst, power of two.
    pub rab: u8,
    pub ieee: [u8; 3],
    /// Controller Multi-path I/O and Namespace Sharing, see [`Cmic`].
    pub cmic: u8,
    /// Maximum Data Transfer Size as a power of two of the minimum page size; 0 is no limit.
    pub mdts: u8,
    pub cntlid: U16,
    /// Same as the VS property.
    pub ver: U32,
    pub rtd3r: U32,
    /// RTD3 Entry Latency, microseconds: how long a shutdown may take.
    pub rtd3e: U32,
    /// Optional Asynchronous Events Supported, the bits of [`super::features::AsyncEventConfiguration`].
    pub oaes: U32,
    /// Controller Attributes, see [`Ctratt`].
    pub ctratt: U32,
    pub rrls: U16,
    pub rsvd102: [u8; 9],
    /// Controller Type: 1 I/O, 2 discovery, 3 administrative.
    pub cntrltype: u8,
    pub fguid: [u8; 16],
    /// Command Retry Delay Times 1 to 3, in 100 ms.
    pub crdt: [U16; 3],
    pub rsvd134: [u8; 119],
    pub nvmsr: u8,
    pub vwci: u8,
    pub mec: u8,
    /// Optional Admin Command Support.
    pub oacs: U16,
    /// Abort Command Limit, 0's based.
    pub acl: u8,
    /// Asynchronous Event Request Limit, 0's based.
    pub aerl: u8,
    /// Firmware Updates: bit 0 slot 1 read only, bits 3:1 number of slots.
    pub frmw: u8,
    /// Log Page Attributes, see [`Lpa`].
    pub lpa: u8,
    /// Error Log Page Entries, 0's based.
    pub elpe: u8,
    /// Number of Power States Support, 0's based.
    pub npss: u8,
    pub avscc: u8,
    pub apsta: u8,
    /// Warning Composite Temperature, kelvin.
    pub wctemp: U16,
    pub cctemp: U16,
    pub mtfa: U16,
    pub hmpre: U32,
    pub hmmin: U32,
    /// Total NVM Capacity, bytes.
    pub tnvmcap: U128,
    /// Unallocated NVM Capacity, bytes.
    pub unvmcap: U128,
    pub rpmbs: U32,
    pub edstt: U16,
    pub dsto: u8,
    pub fwug: u8,
    /// Keep Alive Support: granularity in 100 ms; 0 is none.
    pub kas: U16,
    pub hctma: U16,
    pub mntmt: U16,
    pub mxtmt: U16,
    pub sanicap: U32,
    pub hmminds: U32,
    pub hmmaxd: U16,
    pub nsetidmax: U16,
    pub endgidmax: U16,
    /// ANA Transition Time, seconds.
    pub anatt: u8,
    /// ANA Capabilities, see [`Anacap`].
    pub anacap: u8,
    /// Highest ANA group identifier.
    pub anagrpmax: U32,
    /// Number of ANA group identifiers.
    pub nanagrpid: U32,
    pub pels: U32,
    pub domainid: U16,
    pub rsvd358: [u8; 10],
    pub megcap: U128,
    pub rsvd384: [u8; 128],
    /// Submission Queue Entry Size: required in bits 3:0, maximum in bits 7:4, powers of two.
    pub sqes: u8,
    pub cqes: u8,
    /// Maximum Outstanding Commands per queue.
    pub maxcmd: U16,
    /// Number of Namespaces: the highest NSID.
    pub nn: U32,
    /// Optional NVM Command Support, see [`Oncs`].
    pub oncs: U16,
    /// Fused Operation Support: bit 0 Compare and Write.
    pub fuses: U16,
    pub fna: u8,
    /// Volatile Write Cache, see [`Vwc`].
    pub vwc: u8,
    /// Atomic Write Unit Normal, logical blocks, 0's based.
    pub awun: U16,
    /// Atomic Write Unit Power Fail, logical blocks, 0's based.
    pub awupf: U16,
    pub icsvscc: u8,
    pub nwpc: u8,
    /// Atomic Compare and Write Unit, 0's based.
    pub acwu: U16,
    /// Copy Descriptor Formats Supported.
    pub ocfs: U16,
    /// SGL Support, see [`Sgls`].
    pub sgls: U32,
    /// Maximum Number of Allowed Namespaces.
    pub mnan: U32,
    pub maxdna: U128,
    pub maxcna: U32,
    pub rsvd564: [u8; 204],
    pub subnqn: [u8; NQN_FIELD_LEN],
    pub rsvd1024: [u8; 768],
    /// I/O Queue Command Capsule Supported Size, 16 byte units: 4 is no in-capsule data.
    pub ioccsz: U32,
    /// I/O Queue Response Capsule Supported Size, 16 byte units: 1.
    pub iorcsz: U32,
    /// In Capsule Data Offset, 16 byte units: 0 over TCP.
    pub icdoff: U16,
    /// Fabrics Controller Attributes: bit 0 = static controller model.
    pub fcatt: u8,
    /// Maximum SGL Data Block Descriptors: 1 over TCP.
    pub msdbd: u8,
    /// Optional Fabric Commands Support: bit 0 Disconnect.
    pub ofcs: U16,
    pub dctype: u8,
    pub rsvd1807: [u8; 241],
    pub psd: [PowerState; 32],
    pub vs: [u8; 1024],
}

const _: () = {
    assert!(size_of::<IdentifyController>() == 4096);
    assert!(offset_of!(IdentifyController, vid) == 0);
    assert!(offset_of!(IdentifyController, ssvid) == 2);
    assert!(offset_of!(IdentifyController, sn) == 4);
    assert!(offset_of!(IdentifyController, mn) == 24);
    assert!(offset_of!(IdentifyController, fr) == 64);
    assert!(offset_of!(IdentifyController, rab) == 72);
    assert!(offset_of!(IdentifyController, ieee) == 73);
    assert!(offset_of!(IdentifyController, cmic) == 76);
    assert!(offset_of!(IdentifyController, mdts) == 77);
    assert!(offset_of!(IdentifyController, cntlid) == 78);
    assert!(offset_of!(IdentifyController, ver) == 80);
    assert!(offset_of!(IdentifyController, rtd3r) == 84);
    assert!(offset_of!(IdentifyController, rtd3e) == 88);
    assert!(offset_of!(IdentifyController, oaes) == 92);
    assert!(offset_of!(IdentifyController, ctratt) == 96);
    assert!(offset_of!(IdentifyController, rrls) == 100);
    assert!(offset_of!(IdentifyController, cntrltype) == 111);
    assert!(offset_of!(IdentifyController, fguid) == 112);
    assert!(offset_of!(IdentifyController, crdt) == 128);
    assert!(offset_of!(IdentifyController, nvmsr) == 253);
    assert!(offset_of!(IdentifyController, vwci) == 254);
    assert!(offset_of!(IdentifyController, mec) == 255);
    assert!(offset_of!(IdentifyController, oacs) == 256);
    assert!(offset_of!(IdentifyController, acl) == 258);
    assert!(offset_of!(IdentifyController, aerl) == 259);
    assert!(offset_of!(IdentifyController, frmw) == 260);
    assert!(offset_of!(IdentifyController, lpa) == 261);
    assert!(offset_of!(IdentifyController, elpe) == 262);
    assert!(offset_of!(IdentifyController, npss) == 263);
    assert!(offset_of!(IdentifyController, avscc) == 264);
    assert!(offset_of!(IdentifyController, apsta) == 265);
    assert!(offset_of!(IdentifyController, wctemp) == 266);
    assert!(offset_of!(IdentifyController, cctemp) == 268);
    assert!(offset_of!(IdentifyController, mtfa) == 270);
    assert!(offset_of!(IdentifyController, hmpre) == 272);
    assert!(offset_of!(IdentifyController, hmmin) == 276);
    assert!(offset_of!(IdentifyController, tnvmcap) == 280);
    assert!(offset_of!(IdentifyController, unvmcap) == 296);
    assert!(offset_of!(IdentifyController, rpmbs) == 312);
    assert!(offset_of!(IdentifyController, edstt) == 316);
    assert!(offset_of!(IdentifyController, dsto) == 318);
    assert!(offset_of!(IdentifyController, fwug) == 319);
    assert!(offset_of!(IdentifyController, kas) == 320);
    assert!(offset_of!(IdentifyController, hctma) == 322);
    assert!(offset_of!(IdentifyController, mntmt) == 324);
    assert!(offset_of!(IdentifyController, mxtmt) == 326);
    assert!(offset_of!(IdentifyController, sanicap) == 328);
    assert!(offset_of!(IdentifyController, hmminds) == 332);
    assert!(offset_of!(IdentifyController, hmmaxd) == 336);
    assert!(offset_of!(IdentifyController, nsetidmax) == 338);
    assert!(offset_of!(IdentifyController, endgidmax) == 340);
    assert!(offset_of!(IdentifyController, anatt) == 342);
    assert!(offset_of!(IdentifyController, anacap) == 343);
    assert!(offset_of!(IdentifyController, anagrpmax) == 344);
    assert!(offset_of!(IdentifyController, nanagrpid) == 348);
    assert!(offset_of!(IdentifyController, pels) == 352);
    assert!(offset_of!(IdentifyController, domainid) == 356);
    assert!(offset_of!(IdentifyController, megcap) == 368);
    assert!(offset_of!(IdentifyController, sqes) == 512);
    assert!(offset_of!(IdentifyController, cqes) == 513);
    assert!(offset_of!(IdentifyController, maxcmd) == 514);
    assert!(offset_of!(IdentifyController, nn) == 516);
    assert!(offset_of!(IdentifyController, oncs) == 520);
    assert!(offset_of!(IdentifyController, fuses) == 522);
    assert!(offset_of!(IdentifyController, fna) == 524);
    assert!(offset_of!(IdentifyController, vwc) == 525);
    assert!(offset_of!(IdentifyController, awun) == 526);
    assert!(offset_of!(IdentifyController, awupf) == 528);
    assert!(offset_of!(IdentifyController, icsvscc) == 530);
    assert!(offset_of!(IdentifyController, nwpc) == 531);
    assert!(offset_of!(IdentifyController, acwu) == 532);
    assert!(offset_of!(IdentifyController, ocfs) == 534);
    assert!(offset_of!(IdentifyController, sgls) == 536);
    assert!(offset_of!(IdentifyController, mnan) == 540);
    assert!(offset_of!(IdentifyController, maxdna) == 544);
    assert!(offset_of!(IdentifyController, maxcna) == 560);
    assert!(offset_of!(IdentifyController, subnqn) == 768);
    assert!(offset_of!(IdentifyController, ioccsz) == 1792);
    assert!(offset_of!(IdentifyController, iorcsz) == 1796);
    assert!(offset_of!(IdentifyController, icdoff) == 1800);
    assert!(offset_of!(IdentifyController, fcatt) == 1802);
    assert!(offset_of!(IdentifyController, msdbd) == 1803);
    assert!(offset_of!(IdentifyController, ofcs) == 1804);
    assert!(offset_of!(IdentifyController, dctype) == 1806);
    assert!(offset_of!(IdentifyController, psd) == 2048);
    assert!(offset_of!(IdentifyController, vs) == 3072);
};

/// A Power State Descriptor (Base figure 276), 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PowerState {
    /// Maximum Power, 0.01 W unless MXPS is set.
    pub mp: U16,
    pub rsvd2: u8,
    pub flags: u8,
    /// Entry Latency, microseconds.
    pub enlat: U32,
    pub exlat: U32,
    pub rrt: u8,
    pub rrl: u8,
    pub rwt: u8,
    pub rwl: u8,
    pub idlp: U16,
    pub ips: u8,
    pub rsvd19: u8,
    pub actp: U16,
    pub apws: u8,
    pub rsvd23: [u8; 9],
}

const _: () = {
    assert!(size_of::<PowerState>() == 32);
    assert!(offset_of!(PowerState, enlat) == 4);
    assert!(offset_of!(PowerState, idlp) == 16);
    assert!(offset_of!(PowerState, actp) == 20);
};

impl IdentifyController {
    /// The text of `sn`, `mn` or `fr` without its padding; empty when it is not ASCII.
    pub fn text(field: &[u8]) -> &str {
        match std::str::from_utf8(field) {
            Ok(text) if text.is_ascii() => text.trim_end_matches([' ', '\0']),
            _ => "",
        }
    }

    /// Writes `text` into `sn`, `mn` or `fr`, padded with spaces (Base 1.4.2.1); what does not fit is cut.
    pub fn set_text(field: &mut [u8], text: &str) {
        super::log::DiscoveryLogEntry::set_text(field, text);
    }

    /// The most bytes of one data transfer that MDTS allows when the minimum page is 2^(12 + `mpsmin`) bytes, `None` for
    /// no limit.
    pub fn max_transfer_bytes(&self, mpsmin: u32) -> Option<u64> {
        if self.mdts == 0 { None } else { 1u64.checked_shl(12 + mpsmin + u32::from(self.mdts)) }
    }

    /// How many bytes of data an I/O command may carry in its capsule: IOCCSZ without the command itself.
    pub fn in_capsule_bytes(&self) -> u64 {
        (u64::from(self.ioccsz.get()) * 16).saturating_sub(64)
    }
}

bit_fields! {
    /// CMIC (Base figure 275).
    pub struct Cmic(u8);
    flags {
        multi_port, with_multi_port: 0;
        multi_controller, with_multi_controller: 1;
        sr_iov, with_sr_iov: 2;
        /// Asymmetric Namespace Access Reporting.
        ana, with_ana: 3;
    }
    fields {}
}

bit_fields! {
    /// CTRATT, Controller Attributes (Base figure 275).
    pub struct Ctratt(u32);
    flags {
        /// 128-bit Host Identifiers.
        host_id_128, with_host_id_128: 0;
        /// Traffic Based Keep Alive.
        tbkas, with_tbkas: 6;
        /// Extended LBA formats.
        elbas, with_elbas: 15;
    }
    fields {}
}

bit_fields! {
    /// LPA, Log Page Attributes (Base figure 275).
    pub struct Lpa(u8);
    flags {
        /// SMART per namespace.
        smart_per_namespace, with_smart_per_namespace: 0;
        /// Commands Supported and Effects log.
        command_effects, with_command_effects: 1;
        /// Extended data: LPO and 32-bit lengths in Get Log Page.
        extended_data, with_extended_data: 2;
        telemetry, with_telemetry: 3;
        /// Persistent Event log.
        persistent_events, with_persistent_events: 4;
    }
    fields {}
}

bit_fields! {
    /// ONCS, Optional NVM Command Support (Base figure 275).
    pub struct Oncs(u16);
    flags {
        compare, with_compare: 0;
        write_uncorrectable, with_write_uncorrectable: 1;
        dataset_management, with_dataset_management: 2;
        write_zeroes, with_write_zeroes: 3;
        /// Save and Select of features.
        feature_save, with_feature_save: 4;
        reservations, with_reservations: 5;
        timestamp, with_timestamp: 6;
        verify, with_verify: 7;
        copy, with_copy: 8;
    }
    fields {}
}

bit_fields! {
    /// VWC (Base figure 275).
    pub struct Vwc(u8);
    flags {
        /// A volatile write cache is present.
        present, with_present: 0;
    }
    fields {
        /// Flush with NSID FFFFFFFFh: 0 not said, 2 not supported, 3 supported.
        flush_all, with_flush_all: 2, 1;
    }
}

bit_fields! {
    /// SGLS, SGL Support (Base figure 275).
    pub struct Sgls(u32);
    flags {
        /// Keyed SGL Data Block (RDMA).
        keyed, with_keyed: 2;
        /// Data Block with sub type Offset: in-capsule data.
        offset, with_offset: 20;
        /// Transport SGL Data Block.
        transport, with_transport: 21;
    }
    fields {
        /// 0 not supported, 1 no alignment, 2 dword alignment.
        support, with_support: 1, 0;
    }
}

bit_fields! {
    /// ANACAP (Base figure 275): which states may be reported.
    pub struct Anacap(u8);
    flags {
        optimized, with_optimized: 0;
        non_optimized, with_non_optimized: 1;
        inaccessible, with_inaccessible: 2;
        persistent_loss, with_persistent_loss: 3;
        change, with_change: 4;
        /// ANAGRPID does not change while a namespace is attached.
        group_is_stable, with_group_is_stable: 6;
        /// ANAGRPID is supported in namespace management.
        group_in_management, with_group_in_management: 7;
    }
    fields {}
}
