//! Submission and completion queue entries, SGL descriptors and opcodes (Base 2.0, 3.3.3 and 4.1).
#![forbid(unsafe_code)]

use std::fmt;
use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::bits::bit_fields;
use super::status::Status;

/// The NSID that addresses all namespaces (Base 3.2.1.2).
pub const NSID_ALL: u32 = 0xFFFF_FFFF;

/// Admin command opcodes (Base figure 138).
pub mod admin {
    pub const DELETE_IO_SQ: u8 = 0x00;
    pub const CREATE_IO_SQ: u8 = 0x01;
    pub const GET_LOG_PAGE: u8 = 0x02;
    pub const DELETE_IO_CQ: u8 = 0x04;
    pub const CREATE_IO_CQ: u8 = 0x05;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0A;
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0C;
    pub const NAMESPACE_MANAGEMENT: u8 = 0x0D;
    pub const FIRMWARE_COMMIT: u8 = 0x10;
    pub const FIRMWARE_DOWNLOAD: u8 = 0x11;
    pub const DEVICE_SELF_TEST: u8 = 0x14;
    pub const NAMESPACE_ATTACHMENT: u8 = 0x15;
    pub const KEEP_ALIVE: u8 = 0x18;
    pub const DIRECTIVE_SEND: u8 = 0x19;
    pub const DIRECTIVE_RECEIVE: u8 = 0x1A;
    pub const FORMAT_NVM: u8 = 0x80;
    pub const SECURITY_SEND: u8 = 0x81;
    pub const SECURITY_RECEIVE: u8 = 0x82;
    pub const SANITIZE: u8 = 0x84;
}

/// NVM command set opcodes (NVM figure 18; reservations Base figure 390).
pub mod nvm {
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    pub const COMPARE: u8 = 0x05;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    pub const VERIFY: u8 = 0x0C;
    pub const RESERVATION_REGISTER: u8 = 0x0D;
    pub const RESERVATION_REPORT: u8 = 0x0E;
    pub const RESERVATION_ACQUIRE: u8 = 0x11;
    pub const RESERVATION_RELEASE: u8 = 0x15;
    pub const COPY: u8 = 0x19;
}

/// The opcode of every Fabrics command (Base figure 138); which one it is stands in [`Sqe::fctype`].
pub const OPCODE_FABRICS: u8 = 0x7F;

/// Which way data moves, as the two low bits of every opcode say (Base figure 139).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataDirection {
    None,
    HostToController,
    ControllerToHost,
    Bidirectional,
}

impl DataDirection {
    /// From an opcode, or from the FCTYPE of a Fabrics command, which uses the same two bits.
    pub const fn of(opcode: u8) -> DataDirection {
        match opcode & 3 {
            0 => DataDirection::None,
            1 => DataDirection::HostToController,
            2 => DataDirection::ControllerToHost,
            _ => DataDirection::Bidirectional,
        }
    }
}

bit_fields! {
    /// Byte 1 of a command: fused operation and data transfer kind (Base figure 87).
    pub struct CommandFlags(u8);
    flags {}
    fields {
        /// FUSE: 0 normal, 1 first of a fused pair, 2 second, 3 reserved.
        fuse, with_fuse: 1, 0;
        /// PSDT: 0 PRP, 1 SGL (metadata contiguous), 2 SGL (metadata SGL). Fabrics requires 1 or 2 (Base 4.1.2).
        psdt, with_psdt: 7, 6;
    }
}

/// A submission queue entry (Base figure 88), 64 bytes.
///
/// The meaning of the command dwords is the command's: [`super::command`] has the typed forms.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Sqe {
    pub opcode: u8,
    /// See [`CommandFlags`].
    pub flags: u8,
    /// Command Identifier, chosen by the host, unique among the commands outstanding on its queue.
    pub cid: U16,
    /// Namespace Identifier; for a Fabrics command the low byte is FCTYPE.
    pub nsid: U32,
    pub cdw2: U32,
    pub cdw3: U32,
    /// Metadata Pointer: not used over NVMe/TCP.
    pub mptr: U64,
    /// Data Pointer: over Fabrics always one SGL descriptor.
    pub dptr: SglDescriptor,
    pub cdw10: U32,
    pub cdw11: U32,
    pub cdw12: U32,
    pub cdw13: U32,
    pub cdw14: U32,
    pub cdw15: U32,
}

const _: () = {
    assert!(size_of::<Sqe>() == 64);
    assert!(offset_of!(Sqe, nsid) == 4);
    assert!(offset_of!(Sqe, mptr) == 16);
    assert!(offset_of!(Sqe, dptr) == 24);
    assert!(offset_of!(Sqe, cdw10) == 40);
    assert!(offset_of!(Sqe, cdw15) == 60);
};

impl Sqe {
    /// An otherwise zero command, addressed to `nsid`, with PSDT set to SGL as Fabrics requires.
    pub fn new(opcode: u8, nsid: u32) -> Sqe {
        let mut sqe = Sqe::new_zeroed();
        sqe.opcode = opcode;
        sqe.flags = CommandFlags(0).with_psdt(1).0;
        sqe.nsid = nsid.into();
        sqe
    }

    pub fn command_flags(&self) -> CommandFlags {
        CommandFlags(self.flags)
    }

    /// The Fabrics Command Type; only meaningful when the opcode is [`OPCODE_FABRICS`].
    pub fn fctype(&self) -> u8 {
        self.nsid.get() as u8
    }

    /// Where this command's data is. PRPs do not exist over Fabrics, and PSDT 11b nowhere (Base 4.1.2).
    pub fn data_kind(&self) -> Result<SglKind, Status> {
        match self.command_flags().psdt() {
            1 | 2 => Ok(self.dptr.kind()),
            _ => Err(Status::INVALID_FIELD.with_dnr()),
        }
    }

    /// Which way this command's data moves.
    pub fn direction(&self) -> DataDirection {
        DataDirection::of(if self.opcode == OPCODE_FABRICS { self.fctype() } else { self.opcode })
    }
}

impl fmt::Debug for Sqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqe")
            .field("opcode", &format_args!("{:#04x}", self.opcode))
            .field("cid", &self.cid.get())
            .field("nsid", &format_args!("{:#x}", self.nsid))
            .field("dptr", &self.dptr)
            .field(
                "cdw10..15",
                &format_args!(
                    "{:08x} {:08x} {:08x} {:08x} {:08x} {:08x}",
                    self.cdw10, self.cdw11, self.cdw12, self.cdw13, self.cdw14, self.cdw15
                ),
            )
            .finish()
    }
}

/// A completion queue entry (Base figure 91), 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Cqe {
    /// Command specific result.
    pub dw0: U32,
    pub dw1: U32,
    /// Submission Queue Head Pointer; not meaningful when the queue runs without SQ flow control.
    pub sqhd: U16,
    /// Submission Queue Identifier; reserved over Fabrics (Base figure 90).
    pub sqid: U16,
    pub cid: U16,
    /// Status Field in bits 15:1; bit 0 is the phase tag, reserved over Fabrics. See [`Cqe::status`].
    pub status: U16,
}

const _: () = {
    assert!(size_of::<Cqe>() == 16);
    assert!(offset_of!(Cqe, sqhd) == 8);
    assert!(offset_of!(Cqe, cid) == 12);
    assert!(offset_of!(Cqe, status) == 14);
};

impl Cqe {
    pub fn new(cid: u16, status: Status) -> Cqe {
        Cqe { cid: cid.into(), status: status.to_wire().into(), ..Cqe::new_zeroed() }
    }

    /// The same completion with command specific result dwords 0 and 1.
    #[must_use]
    pub fn with_result(mut self, result: u64) -> Cqe {
        self.dw0 = (result as u32).into();
        self.dw1 = ((result >> 32) as u32).into();
        self
    }

    #[must_use]
    pub fn with_sqhd(mut self, sqhd: u16) -> Cqe {
        self.sqhd = sqhd.into();
        self
    }

    pub fn status(&self) -> Status {
        Status::from_wire(self.status.get())
    }

    /// Dwords 0 and 1 as one value (Property Get returns eight bytes).
    pub fn result(&self) -> u64 {
        u64::from(self.dw0.get()) | u64::from(self.dw1.get()) << 32
    }
}

impl fmt::Debug for Cqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cqe")
            .field("cid", &self.cid.get())
            .field("status", &self.status())
            .field("result", &format_args!("{:#x}", self.result()))
            .field("sqhd", &self.sqhd.get())
            .finish()
    }
}

/// An SGL descriptor (Base 4.1.2, figure 99), 16 bytes. Over NVMe/TCP a command carries exactly one: data in the
/// capsule ([`SglDescriptor::in_capsule`]) or moved by the transport ([`SglDescriptor::transport`]).
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SglDescriptor {
    /// Address, or the offset into the capsule's data when the sub type is Offset.
    pub address: U64,
    /// Length in bytes.
    pub length: U32,
    pub rsvd12: [u8; 3],
    /// SGL Identifier: descriptor type in bits 7:4, sub type in bits 3:0. See [`SglKind`].
    pub identifier: u8,
}

const _: () = {
    assert!(size_of::<SglDescriptor>() == 16);
    assert!(offset_of!(SglDescriptor, length) == 8);
    assert!(offset_of!(SglDescriptor, identifier) == 15);
};

/// The SGL descriptors that NVMe/TCP knows (TCP 3.3.1), anything else being [`SglKind::Other`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SglKind {
    /// Data Block, sub type Offset (01h): the data is in the capsule.
    InCapsule,
    /// Transport SGL Data Block (5Ah): the data moves in H2CData or C2HData PDUs.
    Transport,
    Other(u8),
}

impl SglDescriptor {
    /// Data Block with sub type Offset.
    pub const IN_CAPSULE: u8 = 0x01;
    /// Transport SGL Data Block with sub type Transport Specific (Ah).
    pub const TRANSPORT: u8 = 0x5A;

    /// Data of `length` bytes that begins `offset` bytes into the capsule's data area.
    pub fn in_capsule(offset: u64, length: u32) -> SglDescriptor {
        SglDescriptor {
            address: offset.into(),
            length: length.into(),
            rsvd12: [0; 3],
            identifier: Self::IN_CAPSULE,
        }
    }

    /// Data of `length` bytes, moved by the transport.
    pub fn transport(length: u32) -> SglDescriptor {
        SglDescriptor {
            address: 0.into(),
            length: length.into(),
            rsvd12: [0; 3],
            identifier: Self::TRANSPORT,
        }
    }

    pub fn kind(&self) -> SglKind {
        match self.identifier {
            Self::IN_CAPSULE => SglKind::InCapsule,
            Self::TRANSPORT => SglKind::Transport,
            other => SglKind::Other(other),
        }
    }
}

impl fmt::Debug for SglDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}(address {:#x}, length {})", self.kind(), self.address, self.length)
    }
}
