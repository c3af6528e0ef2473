//! Layout of the Persistent Event log (Base 2.0, 5.16.1.14).
#![forbid(unsafe_code)]

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::log::U128;
use super::nqn::NQN_FIELD_LEN;

/// Bits 1:0 of the Log Specific Parameter: what to do with the reporting context.
pub mod action {
    pub const READ: u8 = 0;
    pub const ESTABLISH_AND_READ: u8 = 1;
    pub const RELEASE: u8 = 2;
}

/// Types of events.
pub mod event_type {
    /// Power-on or Reset.
    pub const RESET: u8 = 0x04;
    pub const CHANGE_NAMESPACE: u8 = 0x06;
}

/// The SEL field of Namespace Management, dword 10 (Base 5.23).
pub mod sel {
    pub const CREATE: u32 = 0;
    pub const DELETE: u32 = 1;
}

/// The header, 512 bytes; events follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LogHeader {
    pub lid: u8,
    pub rsvd1: [u8; 3],
    /// Total Number of Events.
    pub events: U32,
    /// Total Log Length, bytes, header included.
    pub log_len: U64,
    /// Log Revision.
    pub revision: u8,
    pub rsvd17: u8,
    /// Log Header Length: the bytes behind this field.
    pub header_len: U16,
    pub timestamp: U64,
    pub power_on_hours: U128,
    pub power_cycles: U64,
    pub vid: U16,
    pub ssvid: U16,
    pub serial_number: [u8; 20],
    pub model_number: [u8; 40],
    pub subnqn: [u8; NQN_FIELD_LEN],
    /// Generation Number: another one whenever the log is another one.
    pub generation: U16,
    /// Reporting Context Information.
    pub context: U32,
    pub rsvd378: [u8; 102],
    /// Supported Events Bitmap, by type.
    pub supported: [u8; 32],
}

const _: () = {
    assert!(size_of::<LogHeader>() == 512);
    assert!(offset_of!(LogHeader, log_len) == 8);
    assert!(offset_of!(LogHeader, header_len) == 18);
    assert!(offset_of!(LogHeader, timestamp) == 20);
    assert!(offset_of!(LogHeader, power_on_hours) == 28);
    assert!(offset_of!(LogHeader, vid) == 52);
    assert!(offset_of!(LogHeader, serial_number) == 56);
    assert!(offset_of!(LogHeader, subnqn) == 116);
    assert!(offset_of!(LogHeader, generation) == 372);
    assert!(offset_of!(LogHeader, context) == 374);
    assert!(offset_of!(LogHeader, supported) == 480);
};

impl LogHeader {
    pub const REVISION: u8 = 2;
    pub const LEN_FIELD: u16 = (size_of::<LogHeader>() - 20) as u16;
    /// RCE, bit 18 of the context information: a reporting context exists.
    pub const CONTEXT_EXISTS: u32 = 1 << 18;
}

/// The header of an event, 24 bytes; its data follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EventHeader {
    pub event_type: u8,
    pub revision: u8,
    /// Event Header Length: the bytes behind this field.
    pub header_len: u8,
    pub rsvd3: u8,
    pub controller_id: U16,
    pub timestamp: U64,
    pub port_id: U16,
    pub rsvd16: [u8; 4],
    pub vendor_len: U16,
    /// Event Length: the data and the vendor's information.
    pub event_len: U16,
}

const _: () = {
    assert!(size_of::<EventHeader>() == 24);
    assert!(offset_of!(EventHeader, timestamp) == 6);
    assert!(offset_of!(EventHeader, event_len) == 22);
};

impl EventHeader {
    pub const LEN_FIELD: u8 = (size_of::<EventHeader>() - 3) as u8;
}

/// One controller in a Power-on or Reset event, behind 8 bytes of firmware revision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ResetDescriptor {
    pub controller_id: U16,
    pub firmware_activation: u8,
    pub operation_in_progress: u8,
    pub rsvd4: [u8; 12],
    pub power_cycle: U32,
    pub power_on_ms: U64,
    pub controller_timestamp: U64,
}

const _: () = assert!(size_of::<ResetDescriptor>() == 36);

/// The data of a Change Namespace event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChangeNamespace {
    /// Dword 10 of the Namespace Management command, see [`sel`].
    pub command: U32,
    pub rsvd4: [u8; 4],
    pub nsze: U64,
    pub rsvd16: [u8; 8],
    pub ncap: U64,
    pub flbas: u8,
    pub dps: u8,
    pub nmic: u8,
    pub rsvd35: u8,
    pub anagrpid: U32,
    pub nvmsetid: U16,
    pub rsvd42: [u8; 2],
    pub nsid: U32,
}

const _: () = {
    assert!(size_of::<ChangeNamespace>() == 48);
    assert!(offset_of!(ChangeNamespace, nsze) == 8);
    assert!(offset_of!(ChangeNamespace, ncap) == 24);
    assert!(offset_of!(ChangeNamespace, anagrpid) == 36);
    assert!(offset_of!(ChangeNamespace, nsid) == 44);
};
