//! NVMe over Fabrics: the Connect, Property and Disconnect commands and the controller properties (Base 2.0, 3.1.3 and 6).
#![forbid(unsafe_code)]

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::base::{CommandFlags, OPCODE_FABRICS, SglDescriptor, Sqe};
use super::bits::bit_fields;
use super::nqn::NQN_FIELD_LEN;
use super::status::Status;

/// Fabrics Command Types (Base figure 386).
pub mod fctype {
    pub const PROPERTY_SET: u8 = 0x00;
    pub const CONNECT: u8 = 0x01;
    pub const PROPERTY_GET: u8 = 0x04;
    pub const AUTHENTICATION_SEND: u8 = 0x05;
    pub const AUTHENTICATION_RECEIVE: u8 = 0x06;
    pub const DISCONNECT: u8 = 0x08;
}

/// CNTLID in Connect data that asks for any controller of the dynamic model (Base 3.1.2).
pub const CNTLID_DYNAMIC: u16 = 0xFFFF;
/// CNTLID in Connect data that asks for any available controller of the static model.
pub const CNTLID_STATIC_ANY: u16 = 0xFFFE;
/// The largest CNTLID that a controller may have: FFF0h-FFFFh are reserved (Base 3.1.2).
pub const CNTLID_MAX: u16 = 0xFFEF;

/// The Connect command (Base 6.3, figure 378).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ConnectCommand {
    pub opcode: u8,
    pub flags: u8,
    pub cid: U16,
    pub fctype: u8,
    pub rsvd5: [u8; 19],
    pub dptr: SglDescriptor,
    /// Record Format: 0 is the only one defined.
    pub recfmt: U16,
    /// Queue Identifier: 0 creates the association, others are I/O queues.
    pub qid: U16,
    /// Submission Queue Size, 0's based: 31 is a queue of 32 entries.
    pub sqsize: U16,
    /// Connect Attributes, see [`ConnectAttributes`].
    pub cattr: u8,
    pub rsvd47: u8,
    /// Keep Alive Timeout in milliseconds, admin queue only; 0 switches it off.
    pub kato: U32,
    pub rsvd52: [u8; 12],
}

const _: () = {
    assert!(size_of::<ConnectCommand>() == 64);
    assert!(offset_of!(ConnectCommand, fctype) == 4);
    assert!(offset_of!(ConnectCommand, dptr) == 24);
    assert!(offset_of!(ConnectCommand, recfmt) == 40);
    assert!(offset_of!(ConnectCommand, qid) == 42);
    assert!(offset_of!(ConnectCommand, sqsize) == 44);
    assert!(offset_of!(ConnectCommand, cattr) == 46);
    assert!(offset_of!(ConnectCommand, kato) == 48);
};

bit_fields! {
    /// CATTR of Connect (Base figure 378).
    pub struct ConnectAttributes(u8);
    flags {
        /// Disable SQ Flow Control: completions do not move SQHD.
        disable_sq_flow_control, with_disable_sq_flow_control: 2;
        /// The host may delete this I/O queue on its own with Disconnect.
        individual_queue_deletion, with_individual_queue_deletion: 3;
    }
    fields {
        /// Priority class, 0 urgent to 3 low; only with weighted round robin.
        priority, with_priority: 1, 0;
    }
}

impl ConnectCommand {
    /// A Connect with its 1024 bytes of data in the capsule. `entries` is the queue's size, not 0's based.
    pub fn new(qid: u16, entries: u16, cattr: ConnectAttributes, kato_ms: u32) -> ConnectCommand {
        ConnectCommand {
            opcode: OPCODE_FABRICS,
            flags: CommandFlags(0).with_psdt(1).0,
            fctype: fctype::CONNECT,
            dptr: SglDescriptor::in_capsule(0, size_of::<ConnectData>() as u32),
            qid: qid.into(),
            sqsize: entries.saturating_sub(1).into(),
            cattr: cattr.0,
            kato: kato_ms.into(),
            ..ConnectCommand::new_zeroed()
        }
    }

    pub fn from_sqe(sqe: &Sqe) -> ConnectCommand {
        zerocopy::transmute!(*sqe)
    }

    pub fn to_sqe(self) -> Sqe {
        zerocopy::transmute!(self)
    }

    pub fn attributes(&self) -> ConnectAttributes {
        ConnectAttributes(self.cattr)
    }
}

/// The data of a Connect command (Base figure 379), 1024 bytes.
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ConnectData {
    /// Host Identifier.
    pub hostid: [u8; 16],
    /// Controller Identifier asked for: [`CNTLID_DYNAMIC`] on the admin queue, then the one granted.
    pub cntlid: U16,
    pub rsvd18: [u8; 238],
    pub subnqn: [u8; NQN_FIELD_LEN],
    pub hostnqn: [u8; NQN_FIELD_LEN],
    pub rsvd768: [u8; 256],
}

const _: () = {
    assert!(size_of::<ConnectData>() == 1024);
    assert!(offset_of!(ConnectData, cntlid) == 16);
    assert!(offset_of!(ConnectData, subnqn) == 256);
    assert!(offset_of!(ConnectData, hostnqn) == 512);
};

impl ConnectData {
    /// NQNs longer than 255 bytes are cut, so that a test can send one that is too long.
    pub fn new(hostid: [u8; 16], cntlid: u16, subnqn: &str, hostnqn: &str) -> Box<ConnectData> {
        let mut data = Box::new(ConnectData::new_zeroed());
        data.hostid = hostid;
        data.cntlid = cntlid.into();
        data.subnqn = super::nqn::to_field(subnqn);
        data.hostnqn = super::nqn::to_field(hostnqn);
        data
    }
}

bit_fields! {
    /// Dword 0 of a successful Connect (Base figure 380).
    pub struct ConnectResult(u32);
    flags {
        /// ATR: DH-HMAC-CHAP (or another protocol) must be done before anything else.
        authentication_required, with_authentication_required: 17;
        /// ASCR: a secure channel concatenation is required.
        secure_channel_required, with_secure_channel_required: 18;
    }
    fields {
        cntlid, with_cntlid: 15, 0;
    }
}

bit_fields! {
    /// Dword 0 of a Connect that failed with Connect Invalid Parameters (Base figure 381).
    pub struct ConnectRefusal(u32);
    flags {
        /// IATTR: the offending parameter is in the data (true) or in the command (false).
        in_data, with_in_data: 16;
    }
    fields {
        /// IPO: the byte offset of the offending parameter.
        offset, with_offset: 15, 0;
    }
}

impl ConnectRefusal {
    /// The parameter that starts `offset` bytes into the Connect command.
    pub const fn command(offset: usize) -> ConnectRefusal {
        ConnectRefusal(0).with_offset(offset as u32)
    }

    /// The parameter that starts `offset` bytes into the Connect data.
    pub const fn data(offset: usize) -> ConnectRefusal {
        ConnectRefusal(0).with_in_data(true).with_offset(offset as u32)
    }

    pub const RECFMT: ConnectRefusal = Self::command(offset_of!(ConnectCommand, recfmt));
    pub const QID: ConnectRefusal = Self::command(offset_of!(ConnectCommand, qid));
    pub const SQSIZE: ConnectRefusal = Self::command(offset_of!(ConnectCommand, sqsize));
    pub const CATTR: ConnectRefusal = Self::command(offset_of!(ConnectCommand, cattr));
    pub const KATO: ConnectRefusal = Self::command(offset_of!(ConnectCommand, kato));
    pub const HOSTID: ConnectRefusal = Self::data(offset_of!(ConnectData, hostid));
    pub const CNTLID: ConnectRefusal = Self::data(offset_of!(ConnectData, cntlid));
    pub const SUBNQN: ConnectRefusal = Self::data(offset_of!(ConnectData, subnqn));
    pub const HOSTNQN: ConnectRefusal = Self::data(offset_of!(ConnectData, hostnqn));

    /// The status that goes with it: the same Connect will fail again.
    pub const STATUS: Status = Status::CONNECT_INVALID_PARAMETERS.with_dnr();
}

/// Property Set and Property Get (Base 6.5, 6.6): same layout, `value` unused by Get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PropertyCommand {
    pub opcode: u8,
    pub flags: u8,
    pub cid: U16,
    pub fctype: u8,
    pub rsvd5: [u8; 35],
    /// Attributes: bits 2:0 are the size of the property, 0 = 4 bytes, 1 = 8 bytes.
    pub attrib: u8,
    pub rsvd41: [u8; 3],
    /// The property's offset, see [`property`].
    pub ofst: U32,
    pub value: U64,
    pub rsvd56: [u8; 8],
}

const _: () = {
    assert!(size_of::<PropertyCommand>() == 64);
    assert!(offset_of!(PropertyCommand, attrib) == 40);
    assert!(offset_of!(PropertyCommand, ofst) == 44);
    assert!(offset_of!(PropertyCommand, value) == 48);
};

impl PropertyCommand {
    pub fn get(offset: u32) -> PropertyCommand {
        PropertyCommand {
            opcode: OPCODE_FABRICS,
            flags: CommandFlags(0).with_psdt(1).0,
            fctype: fctype::PROPERTY_GET,
            attrib: u8::from(property::width(offset) == Some(8)),
            ofst: offset.into(),
            ..PropertyCommand::new_zeroed()
        }
    }

    pub fn set(offset: u32, value: u64) -> PropertyCommand {
        PropertyCommand { fctype: fctype::PROPERTY_SET, value: value.into(), ..PropertyCommand::get(offset) }
    }

    pub fn from_sqe(sqe: &Sqe) -> PropertyCommand {
        zerocopy::transmute!(*sqe)
    }

    pub fn to_sqe(self) -> Sqe {
        zerocopy::transmute!(self)
    }

    /// The size in bytes that the command asks for, or `None` when the attribute is reserved.
    pub fn width(&self) -> Option<u32> {
        match self.attrib & 7 {
            0 => Some(4),
            1 => Some(8),
            _ => None,
        }
    }
}

/// Offsets of the controller properties that exist over Fabrics (Base 3.1.3, figure 33).
pub mod property {
    /// Controller Capabilities, 8 bytes.
    pub const CAP: u32 = 0x00;
    /// Version, 4 bytes.
    pub const VS: u32 = 0x08;
    /// Controller Configuration, 4 bytes.
    pub const CC: u32 = 0x14;
    /// Controller Status, 4 bytes.
    pub const CSTS: u32 = 0x1C;
    /// NVM Subsystem Reset, 4 bytes, optional.
    pub const NSSR: u32 = 0x20;
    /// Controller Ready Timeouts, 4 bytes.
    pub const CRTO: u32 = 0x68;

    /// The value to write to [`NSSR`] to reset: "NVMe".
    pub const NSSR_RESET: u32 = 0x4E56_4D65;

    /// The size of a property in bytes, `None` if there is none at this offset.
    pub const fn width(offset: u32) -> Option<u32> {
        match offset {
            CAP => Some(8),
            VS | CC | CSTS | NSSR | CRTO => Some(4),
            _ => None,
        }
    }
}

/// Disconnect (Base 6.4): ends an I/O queue. RECFMT at byte 40 is 0.
pub fn disconnect_command() -> Sqe {
    Sqe::new(OPCODE_FABRICS, u32::from(fctype::DISCONNECT))
}

bit_fields! {
    /// CAP, Controller Capabilities (Base 3.1.3.1, figure 36).
    pub struct Cap(u64);
    flags {
        /// Contiguous Queues Required; 1 over Fabrics.
        cqr, with_cqr: 16;
        /// NVM Subsystem Reset Supported.
        nssrs, with_nssrs: 36;
    }
    fields {
        /// Maximum Queue Entries Supported, 0's based.
        mqes, with_mqes: 15, 0;
        /// Arbitration Mechanism Supported.
        ams, with_ams: 18, 17;
        /// Timeout: the worst wait for CSTS.RDY, in units of 500 ms.
        to, with_to: 31, 24;
        /// Doorbell Stride; 0 over Fabrics.
        dstrd, with_dstrd: 35, 32;
        /// Command Sets Supported: bit 0 NVM, bit 6 I/O command sets by CC.CSS=6, bit 7 no I/O command set.
        css, with_css: 44, 37;
        /// Memory Page Size Minimum, 2^(12+x).
        mpsmin, with_mpsmin: 51, 48;
        /// Memory Page Size Maximum, 2^(12+x).
        mpsmax, with_mpsmax: 55, 52;
        /// Controller Ready Modes Supported.
        crms, with_crms: 60, 59;
    }
}

bit_fields! {
    /// VS, Version (Base 3.1.3.2).
    pub struct Version(u32);
    flags {}
    fields {
        tertiary, with_tertiary: 7, 0;
        minor, with_minor: 15, 8;
        major, with_major: 31, 16;
    }
}

impl Version {
    pub const V1_4: Version = Version(0x0001_0400);
    pub const V2_0: Version = Version(0x0002_0000);
}

bit_fields! {
    /// CC, Controller Configuration (Base 3.1.3.5, figure 46).
    pub struct Cc(u32);
    flags {
        /// Enable.
        en, with_en: 0;
        /// Controller Ready Independent of Media Enable.
        crime, with_crime: 24;
    }
    fields {
        /// I/O Command Set Selected: 0 NVM, 6 all that are supported, 7 admin only.
        css, with_css: 6, 4;
        /// Memory Page Size, 2^(12+x).
        mps, with_mps: 10, 7;
        /// Arbitration Mechanism Selected.
        ams, with_ams: 13, 11;
        /// Shutdown Notification: 0 none, 1 normal, 2 abrupt.
        shn, with_shn: 15, 14;
        /// I/O Submission Queue Entry Size as a power of two: 6.
        iosqes, with_iosqes: 19, 16;
        /// I/O Completion Queue Entry Size as a power of two: 4.
        iocqes, with_iocqes: 23, 20;
    }
}

impl Cc {
    /// What a host writes to enable a controller: 64 byte commands, 16 byte completions, 4 KiB pages, EN.
    pub const ENABLE: Cc = Cc(0).with_en(true).with_iosqes(6).with_iocqes(4);
}

bit_fields! {
    /// CSTS, Controller Status (Base 3.1.3.6, figure 47).
    pub struct Csts(u32);
    flags {
        /// Ready.
        rdy, with_rdy: 0;
        /// Controller Fatal Status.
        cfs, with_cfs: 1;
        /// NVM Subsystem Reset Occurred.
        nssro, with_nssro: 4;
        /// Processing Paused.
        pp, with_pp: 5;
        /// Shutdown Type: 1 = the shutdown is of the whole subsystem.
        st, with_st: 6;
    }
    fields {
        /// Shutdown Status: 0 normal operation, 1 processing, 2 complete.
        shst, with_shst: 3, 2;
    }
}
