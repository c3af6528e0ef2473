//! Log pages (Base 2.0, 5.16.1): discovery, error information, SMART, firmware slots, changed namespaces, command
//! effects, asymmetric access.
#![forbid(unsafe_code)]

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::bits::bit_fields;
use super::nqn::NQN_FIELD_LEN;

/// Log Page Identifiers (Base figure 202).
pub mod lid {
    pub const SUPPORTED_LOG_PAGES: u8 = 0x00;
    pub const ERROR: u8 = 0x01;
    pub const SMART: u8 = 0x02;
    pub const FIRMWARE_SLOT: u8 = 0x03;
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    pub const COMMAND_EFFECTS: u8 = 0x05;
    pub const DEVICE_SELF_TEST: u8 = 0x06;
    pub const TELEMETRY_HOST: u8 = 0x07;
    pub const TELEMETRY_CONTROLLER: u8 = 0x08;
    pub const ANA: u8 = 0x0C;
    pub const PERSISTENT_EVENT: u8 = 0x0D;
    pub const FEATURE_EFFECTS: u8 = 0x12;
    pub const DISCOVERY: u8 = 0x70;
    pub const RESERVATION_NOTIFICATION: u8 = 0x80;
    pub const SANITIZE: u8 = 0x81;
}

/// An unsigned integer of 16 bytes, little endian, as SMART counters and capacities are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct U128(pub [u8; 16]);

impl U128 {
    pub const fn new(value: u128) -> U128 {
        U128(value.to_le_bytes())
    }

    pub const fn get(self) -> u128 {
        u128::from_le_bytes(self.0)
    }
}

impl From<u128> for U128 {
    fn from(value: u128) -> U128 {
        U128::new(value)
    }
}

/// The header of the Discovery Log Page (Base 5.16.1.23, figure 264), 1024 bytes; entries follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DiscoveryLogHeader {
    /// Generation Counter: changes with the log; a host that sees it change between two reads starts again.
    pub genctr: U64,
    /// Number of Records.
    pub numrec: U64,
    /// Record Format: 0.
    pub recfmt: U16,
    pub rsvd18: [u8; 1006],
}

const _: () = {
    assert!(size_of::<DiscoveryLogHeader>() == 1024);
    assert!(offset_of!(DiscoveryLogHeader, numrec) == 8);
    assert!(offset_of!(DiscoveryLogHeader, recfmt) == 16);
};

/// A Discovery Log Page Entry (Base figure 265), 1024 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DiscoveryLogEntry {
    /// Transport Type: [`trtype::TCP`] here.
    pub trtype: u8,
    /// Address Family, see [`adrfam`].
    pub adrfam: u8,
    /// Subsystem Type, see [`subtype`].
    pub subtype: u8,
    /// Transport Requirements, see [`Treq`].
    pub treq: u8,
    pub portid: U16,
    /// Controller ID to ask for: FFFFh = dynamic model.
    pub cntlid: U16,
    /// Admin Max SQ Size: at least 32.
    pub asqsz: U16,
    /// Entry Flags, see [`EntryFlags`].
    pub eflags: U16,
    pub rsvd12: [u8; 20],
    /// Transport Service Identifier: the port as decimal ASCII text, padded with spaces or NULs.
    pub trsvcid: [u8; 32],
    pub rsvd64: [u8; 192],
    pub subnqn: [u8; NQN_FIELD_LEN],
    /// Transport Address as ASCII text.
    pub traddr: [u8; 256],
    pub tsas: TcpTsas,
}

const _: () = {
    assert!(size_of::<DiscoveryLogEntry>() == 1024);
    assert!(offset_of!(DiscoveryLogEntry, portid) == 4);
    assert!(offset_of!(DiscoveryLogEntry, asqsz) == 8);
    assert!(offset_of!(DiscoveryLogEntry, trsvcid) == 32);
    assert!(offset_of!(DiscoveryLogEntry, subnqn) == 256);
    assert!(offset_of!(DiscoveryLogEntry, traddr) == 512);
    assert!(offset_of!(DiscoveryLogEntry, tsas) == 768);
};

/// Transport Specific Address Subtype of NVMe/TCP (TCP 1.0 figure 13).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TcpTsas {
    /// Security Type: 0 none, 1 TLS 1.2 (obsolete), 2 TLS 1.3.
    pub sectype: u8,
    pub rsvd1: [u8; 255],
}

/// Transport Types (Base figure 265).
pub mod trtype {
    pub const RDMA: u8 = 1;
    pub const FC: u8 = 2;
    pub const TCP: u8 = 3;
    pub const LOOP: u8 = 254;
}

/// Address Families (Base figure 265).
pub mod adrfam {
    pub const IPV4: u8 = 1;
    pub const IPV6: u8 = 2;
}

/// Subsystem Types (Base figure 265).
pub mod subtype {
    /// A referral to another discovery subsystem.
    pub const REFERRAL: u8 = 1;
    /// An NVM subsystem with I/O controllers.
    pub const NVM: u8 = 2;
    /// The discovery subsystem that gives this log.
    pub const CURRENT_DISCOVERY: u8 = 3;
}

bit_fields! {
    /// TREQ of a discovery entry (Base figure 265).
    pub struct Treq(u8);
    flags {
        /// The host may ask for SQ flow control to be off.
        sq_flow_control_disable, with_sq_flow_control_disable: 2;
    }
    fields {
        /// Secure channel: 0 not specified, 1 required, 2 not required.
        secure_channel, with_secure_channel: 1, 0;
    }
}

bit_fields! {
    /// EFLAGS of a discovery entry (Base figure 265).
    pub struct EntryFlags(u16);
    flags {
        /// DUPRETINFO: duplicate returned information.
        duplicate_information, with_duplicate_information: 0;
        /// EPCSD: explicit persistent connection support for discovery.
        persistent_discovery, with_persistent_discovery: 1;
        /// NCC: no CDC connectivity.
        no_cdc_connectivity, with_no_cdc_connectivity: 2;
    }
    fields {}
}

impl DiscoveryLogEntry {
    /// The text of `traddr` or `trsvcid`: up to the first NUL, without trailing spaces; empty when it is not UTF-8.
    pub fn text(field: &[u8]) -> &str {
        let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
        std::str::from_utf8(&field[..end]).map_or("", |text| text.trim_end_matches(' '))
    }

    /// Writes `text` into a field, padded with spaces as ASCII fields are (Base 1.4.2.1); what does not fit is cut.
    pub fn set_text(field: &mut [u8], text: &str) {
        field.fill(b' ');
        let len = text.len().min(field.len());
        field[..len].copy_from_slice(&text.as_bytes()[..len]);
    }
}

/// An Error Information log entry (Base 5.16.1.2, figure 205), 64 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ErrorLogEntry {
    /// Unique and rising; 0 is an unused entry.
    pub error_count: U64,
    pub sqid: U16,
    pub cid: U16,
    /// Status Field, phase bit included.
    pub status_field: U16,
    pub parameter_location: U16,
    pub lba: U64,
    pub nsid: U32,
    pub vendor_information: u8,
    pub trtype: u8,
    pub rsvd30: [u8; 2],
    pub command_specific: U64,
    pub trtype_specific: U16,
    pub rsvd42: [u8; 22],
}

const _: () = {
    assert!(size_of::<ErrorLogEntry>() == 64);
    assert!(offset_of!(ErrorLogEntry, lba) == 16);
    assert!(offset_of!(ErrorLogEntry, trtype) == 29);
    assert!(offset_of!(ErrorLogEntry, command_specific) == 32);
};

/// SMART / Health Information (Base 5.16.1.3, figure 207), 512 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SmartLog {
    pub critical_warning: u8,
    /// Composite temperature in kelvin.
    pub temperature: U16,
    /// Available spare, percent.
    pub available_spare: u8,
    pub available_spare_threshold: u8,
    pub percentage_used: u8,
    pub endurance_group_critical_warning: u8,
    pub rsvd7: [u8; 25],
    /// In units of 1000 * 512 bytes, rounded up.
    pub data_units_read: U128,
    pub data_units_written: U128,
    pub host_read_commands: U128,
    pub host_write_commands: U128,
    /// Minutes.
    pub controller_busy_time: U128,
    pub power_cycles: U128,
    pub power_on_hours: U128,
    pub unsafe_shutdowns: U128,
    pub media_errors: U128,
    pub error_log_entries: U128,
    pub warning_temperature_time: U32,
    pub critical_temperature_time: U32,
    pub temperature_sensors: [U16; 8],
    pub thermal_transition_counts: [U32; 2],
    pub thermal_total_times: [U32; 2],
    pub rsvd232: [u8; 280],
}

const _: () = {
    assert!(size_of::<SmartLog>() == 512);
    assert!(offset_of!(SmartLog, data_units_read) == 32);
    assert!(offset_of!(SmartLog, warning_temperature_time) == 192);
    assert!(offset_of!(SmartLog, temperature_sensors) == 200);
};

/// Firmware Slot Information (Base 5.16.1.4, figure 208), 512 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FirmwareSlotLog {
    /// Active Firmware Info: bits 2:0 the active slot, bits 6:4 the one of the next reset.
    pub afi: u8,
    pub rsvd1: [u8; 7],
    /// Revisions of slots 1 to 7, ASCII, NULs for an empty slot.
    pub revisions: [[u8; 8]; 7],
    pub rsvd64: [u8; 448],
}

const _: () = {
    assert!(size_of::<FirmwareSlotLog>() == 512);
    assert!(offset_of!(FirmwareSlotLog, revisions) == 8);
};

/// Changed Namespace List (Base 5.16.1.5): NSIDs in rising order, zero filled; more than 1024 changes are shown as one
/// first entry of FFFFFFFFh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChangedNamespaceList {
    pub nsids: [U32; 1024],
}

const _: () = assert!(size_of::<ChangedNamespaceList>() == 4096);

/// Commands Supported and Effects (Base 5.16.1.6, figure 210), 4096 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CommandEffectsLog {
    /// By admin opcode, see [`CommandEffects`].
    pub admin: [U32; 256],
    /// By I/O opcode.
    pub io: [U32; 256],
    pub rsvd2048: [u8; 2048],
}

const _: () = {
    assert!(size_of::<CommandEffectsLog>() == 4096);
    assert!(offset_of!(CommandEffectsLog, io) == 1024);
};

bit_fields! {
    /// The effects of one command (Base figure 211).
    pub struct CommandEffects(u32);
    flags {
        /// Command Supported.
        csupp, with_csupp: 0;
        /// Logical Block Content Change.
        lbcc, with_lbcc: 1;
        /// Namespace Capability Change.
        ncc, with_ncc: 2;
        /// Namespace Inventory Change.
        nic, with_nic: 3;
        /// Controller Capability Change.
        ccc, with_ccc: 4;
    }
    fields {
        /// Command Submission and Execution: 0 no restriction, 1 one per namespace, 2 one per controller.
        cse, with_cse: 18, 16;
    }
}

/// The header of the Asymmetric Namespace Access log (Base 5.16.1.13, figure 227); group descriptors follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AnaLogHeader {
    /// Change Count.
    pub chgcnt: U64,
    /// Number of ANA Group Descriptors.
    pub ngrps: U16,
    pub rsvd10: [u8; 6],
}

const _: () = assert!(size_of::<AnaLogHeader>() == 16);

/// An ANA Group Descriptor without its NSIDs (Base figure 228), 32 bytes; `nnsids` NSIDs of 4 bytes follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AnaGroupDescriptor {
    pub grpid: U32,
    pub nnsids: U32,
    pub chgcnt: U64,
    /// Bits 3:0, see [`ana_state`].
    pub state: u8,
    pub rsvd17: [u8; 15],
}

const _: () = {
    assert!(size_of::<AnaGroupDescriptor>() == 32);
    assert!(offset_of!(AnaGroupDescriptor, state) == 16);
};

/// Asymmetric access states (Base figure 228).
pub mod ana_state {
    pub const OPTIMIZED: u8 = 0x01;
    pub const NON_OPTIMIZED: u8 = 0x02;
    pub const INACCESSIBLE: u8 = 0x03;
    pub const PERSISTENT_LOSS: u8 = 0x04;
    pub const CHANGE: u8 = 0x0F;
}
