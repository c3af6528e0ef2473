//! The status of a completed command: Status Code Type, Status Code and the Do Not Retry bit (Base 2.0, 3.3.3.2).
#![forbid(unsafe_code)]

use std::fmt;

use super::bits::bit_fields;

bit_fields! {
    /// The Status Field of a completion as it stands in bits 15:1 of the entry's last word, moved down by one: the
    /// phase tag, which Fabrics does not use (Base 3.3.3.1), is not part of it.
    pub struct StatusField(u16);
    flags {
        /// More: the Error Information log has more to say.
        more, with_more: 13;
        /// Do Not Retry: the same command will fail again.
        dnr, with_dnr: 14;
    }
    fields {
        /// Status Code.
        sc, with_sc: 7, 0;
        /// Status Code Type.
        sct, with_sct: 10, 8;
        /// Command Retry Delay: which of Identify Controller's CRDT1..3 applies; 0 is none.
        crd, with_crd: 12, 11;
    }
}

/// The outcome of a command: `SUCCESS` or an error with its type, code and retry advice.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(StatusField);

/// Status Code Types (Base, figure "Status Code – Status Code Type Values").
pub mod sct {
    pub const GENERIC: u8 = 0;
    pub const COMMAND_SPECIFIC: u8 = 1;
    pub const MEDIA: u8 = 2;
    pub const PATH: u8 = 3;
    pub const VENDOR: u8 = 7;
}

impl Status {
    /// A status of that type and code, without Do Not Retry.
    pub const fn new(sct: u8, sc: u8) -> Status {
        Status(StatusField(0).with_sct(sct as u16).with_sc(sc as u16))
    }

    /// From the last word of a completion, phase bit included (and ignored).
    pub const fn from_wire(word: u16) -> Status {
        Status(StatusField(word >> 1))
    }

    /// The last word of a completion, with a phase bit of 0.
    pub const fn to_wire(self) -> u16 {
        self.0.0 << 1
    }

    /// The same status with Do Not Retry set: the host must not send the command again.
    #[must_use]
    pub const fn with_dnr(self) -> Status {
        Status(self.0.with_dnr(true))
    }

    pub const fn sct(self) -> u8 {
        self.0.sct() as u8
    }

    pub const fn sc(self) -> u8 {
        self.0.sc() as u8
    }

    pub const fn dnr(self) -> bool {
        self.0.dnr()
    }

    pub const fn field(self) -> StatusField {
        self.0
    }

    pub const fn is_success(self) -> bool {
        self.sct() == 0 && self.sc() == 0
    }

    /// Same type and code, whatever the Do Not Retry and More bits say.
    pub const fn is(self, other: Status) -> bool {
        self.sct() == other.sct() && self.sc() == other.sc()
    }

    /// `Ok` for success, so that `?` works on completions.
    pub fn ok(self) -> Result<(), Status> {
        if self.is_success() { Ok(()) } else { Err(self) }
    }
}

macro_rules! statuses {
    ($( $(#[$meta:meta])* $name:ident = ($sct:literal, $sc:literal), $text:literal; )*) => {
        impl Status {
            $(
                #[doc = $text]
                $(#[$meta])*
                pub const $name: Status = Status::new($sct, $sc);
            )*

            /// The specification's name of this status, if it is one that this crate knows.
            pub const fn name(self) -> Option<&'static str> {
                match (self.sct(), self.sc()) {
                    $( ($sct, $sc) => Some($text), )*
                    _ => None,
                }
            }
        }
    };
}

// Base 2.0 figures 94-98 (Generic, Command Specific, Media and Path status values); NVM 1.0 figures 15-17; Connect and
// Fabrics values of Base figure 96.
statuses! {
    SUCCESS = (0, 0x00), "Successful Completion";
    INVALID_OPCODE = (0, 0x01), "Invalid Command Opcode";
    INVALID_FIELD = (0, 0x02), "Invalid Field in Command";
    COMMAND_ID_CONFLICT = (0, 0x03), "Command ID Conflict";
    DATA_TRANSFER_ERROR = (0, 0x04), "Data Transfer Error";
    ABORTED_POWER_LOSS = (0, 0x05), "Commands Aborted due to Power Loss Notification";
    INTERNAL_ERROR = (0, 0x06), "Internal Error";
    ABORT_REQUESTED = (0, 0x07), "Command Abort Requested";
    ABORTED_SQ_DELETION = (0, 0x08), "Command Aborted due to SQ Deletion";
    ABORTED_FAILED_FUSED = (0, 0x09), "Command Aborted due to Failed Fused Command";
    ABORTED_MISSING_FUSED = (0, 0x0A), "Command Aborted due to Missing Fused Command";
    INVALID_NAMESPACE = (0, 0x0B), "Invalid Namespace or Format";
    COMMAND_SEQUENCE_ERROR = (0, 0x0C), "Command Sequence Error";
    INVALID_SGL_SEGMENT = (0, 0x0D), "Invalid SGL Segment Descriptor";
    INVALID_SGL_COUNT = (0, 0x0E), "Invalid Number of SGL Descriptors";
    DATA_SGL_LENGTH_INVALID = (0, 0x0F), "Data SGL Length Invalid";
    METADATA_SGL_LENGTH_INVALID = (0, 0x10), "Metadata SGL Length Invalid";
    SGL_TYPE_INVALID = (0, 0x11), "SGL Descriptor Type Invalid";
    PRP_OFFSET_INVALID = (0, 0x13), "PRP Offset Invalid";
    ATOMIC_WRITE_UNIT_EXCEEDED = (0, 0x14), "Atomic Write Unit Exceeded";
    OPERATION_DENIED = (0, 0x15), "Operation Denied";
    SGL_OFFSET_INVALID = (0, 0x16), "SGL Offset Invalid";
    HOST_ID_INCONSISTENT_FORMAT = (0, 0x18), "Host Identifier Inconsistent Format";
    KEEP_ALIVE_EXPIRED = (0, 0x19), "Keep Alive Timer Expired";
    KEEP_ALIVE_INVALID = (0, 0x1A), "Keep Alive Timeout Invalid";
    ABORTED_PREEMPT = (0, 0x1B), "Command Aborted due to Preempt and Abort";
    SANITIZE_FAILED = (0, 0x1C), "Sanitize Failed";
    SANITIZE_IN_PROGRESS = (0, 0x1D), "Sanitize In Progress";
    NAMESPACE_WRITE_PROTECTED = (0, 0x20), "Namespace is Write Protected";
    COMMAND_INTERRUPTED = (0, 0x21), "Command Interrupted";
    TRANSIENT_TRANSPORT_ERROR = (0, 0x22), "Transient Transport Error";
    LBA_OUT_OF_RANGE = (0, 0x80), "LBA Out of Range";
    CAPACITY_EXCEEDED = (0, 0x81), "Capacity Exceeded";
    NAMESPACE_NOT_READY = (0, 0x82), "Namespace Not Ready";
    RESERVATION_CONFLICT = (0, 0x83), "Reservation Conflict";
    FORMAT_IN_PROGRESS = (0, 0x84), "Format In Progress";

    COMPLETION_QUEUE_INVALID = (1, 0x00), "Completion Queue Invalid";
    INVALID_QUEUE_ID = (1, 0x01), "Invalid Queue Identifier";
    INVALID_QUEUE_SIZE = (1, 0x02), "Invalid Queue Size";
    ABORT_LIMIT_EXCEEDED = (1, 0x03), "Abort Command Limit Exceeded";
    AER_LIMIT_EXCEEDED = (1, 0x05), "Asynchronous Event Request Limit Exceeded";
    INVALID_FIRMWARE_SLOT = (1, 0x06), "Invalid Firmware Slot";
    INVALID_FIRMWARE_IMAGE = (1, 0x07), "Invalid Firmware Image";
    INVALID_LOG_PAGE = (1, 0x09), "Invalid Log Page";
    INVALID_FORMAT = (1, 0x0A), "Invalid Format";
    INVALID_QUEUE_DELETION = (1, 0x0C), "Invalid Queue Deletion";
    FEATURE_NOT_SAVEABLE = (1, 0x0D), "Feature Identifier Not Saveable";
    FEATURE_NOT_CHANGEABLE = (1, 0x0E), "Feature Not Changeable";
    FEATURE_NOT_NS_SPECIFIC = (1, 0x0F), "Feature Not Namespace Specific";
    INVALID_CONTROLLER_ID = (1, 0x1F), "Invalid Controller Identifier";
    IOCS_NOT_SUPPORTED = (1, 0x29), "I/O Command Set Not Supported";
    IOCS_NOT_ENABLED = (1, 0x2A), "I/O Command Set Not Enabled";
    IOCS_COMBINATION_REJECTED = (1, 0x2B), "I/O Command Set Combination Rejected";
    INVALID_IOCS = (1, 0x2C), "Invalid I/O Command Set";
    // 80h-BFh of the Command Specific type mean different things for Fabrics and for I/O commands. The Fabrics names
    // are the ones kept here, except for 85h and above, which only one of them uses.
    CONNECT_INCOMPATIBLE_FORMAT = (1, 0x80), "Connect Incompatible Format / Conflicting Attributes";
    CONNECT_CONTROLLER_BUSY = (1, 0x81), "Connect Controller Busy / Invalid Protection Information";
    CONNECT_INVALID_PARAMETERS = (1, 0x82), "Connect Invalid Parameters / Attempted Write to Read Only Range";
    CONNECT_RESTART_DISCOVERY = (1, 0x83), "Connect Restart Discovery / Command Size Limit Exceeded";
    CONNECT_INVALID_HOST = (1, 0x84), "Connect Invalid Host";
    INVALID_QUEUE_TYPE = (1, 0x85), "Invalid Queue Type";
    DISCOVER_RESTART = (1, 0x90), "Discover Restart";
    AUTHENTICATION_REQUIRED = (1, 0x91), "Authentication Required";

    WRITE_FAULT = (2, 0x80), "Write Fault";
    UNRECOVERED_READ_ERROR = (2, 0x81), "Unrecovered Read Error";
    GUARD_CHECK_ERROR = (2, 0x82), "End-to-end Guard Check Error";
    APPTAG_CHECK_ERROR = (2, 0x83), "End-to-end Application Tag Check Error";
    REFTAG_CHECK_ERROR = (2, 0x84), "End-to-end Reference Tag Check Error";
    COMPARE_FAILURE = (2, 0x85), "Compare Failure";
    ACCESS_DENIED = (2, 0x86), "Access Denied";
    DEALLOCATED_OR_UNWRITTEN = (2, 0x87), "Deallocated or Unwritten Logical Block";

    INTERNAL_PATH_ERROR = (3, 0x00), "Internal Path Error";
    ANA_PERSISTENT_LOSS = (3, 0x01), "Asymmetric Access Persistent Loss";
    ANA_INACCESSIBLE = (3, 0x02), "Asymmetric Access Inaccessible";
    ANA_TRANSITION = (3, 0x03), "Asymmetric Access Transition";
    CONTROLLER_PATH_ERROR = (3, 0x60), "Controller Pathing Error";
    HOST_PATH_ERROR = (3, 0x70), "Host Pathing Error";
    ABORTED_BY_HOST = (3, 0x71), "Command Aborted By Host";
}

impl Status {
    /// Command Size Limit Exceeded (NVM 1.0 figure 16): a Copy or Dataset Management that asks for too much. The same
    /// value as [`Status::CONNECT_RESTART_DISCOVERY`], told apart by the command it answers.
    pub const COMMAND_SIZE_LIMIT_EXCEEDED: Status = Status::CONNECT_RESTART_DISCOVERY;
    /// Attempted Write to Read Only Range (NVM 1.0 figure 16), shares its value with
    /// [`Status::CONNECT_INVALID_PARAMETERS`].
    pub const WRITE_TO_READ_ONLY_RANGE: Status = Status::CONNECT_INVALID_PARAMETERS;
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name().unwrap_or("unknown status");
        write!(
            f,
            "{name} ({:X}/{:02X}{})",
            self.sct(),
            self.sc(),
            if self.dnr() { ", do not retry" } else { "" }
        )
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Status {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_word_keeps_code_type_and_retry_advice_apart() {
        // SC 82h, SCT 1, DNR: 0x4182 shifted over the phase tag.
        assert_eq!(Status::CONNECT_INVALID_PARAMETERS.with_dnr().to_wire(), 0x8304);
        let status = Status::from_wire(0x8305);
        assert!(status.is(Status::CONNECT_INVALID_PARAMETERS) && status.dnr());
        assert_ne!(status, Status::CONNECT_INVALID_PARAMETERS, "equality includes the retry advice");
        assert_eq!(Status::COMPARE_FAILURE.to_wire(), 0x050A);
        assert_eq!(Status::from_wire(1), Status::SUCCESS, "the phase tag is not an error");
    }

    #[test]
    fn text_names_the_status() {
        assert_eq!(Status::LBA_OUT_OF_RANGE.with_dnr().to_string(), "LBA Out of Range (0/80, do not retry)");
        assert_eq!(Status::new(7, 0x13).to_string(), "unknown status (7/13)");
        assert_eq!(Status::INVALID_FIELD.ok(), Err(Status::INVALID_FIELD));
    }
}
