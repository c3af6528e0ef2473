//! Features and asynchronous events (Base 2.0, 5.2 and 5.27; NVM 1.0, 4.1.3).
#![forbid(unsafe_code)]

use super::bits::bit_fields;

/// Feature Identifiers (Base figure 317, NVM figure 84).
pub mod fid {
    pub const ARBITRATION: u8 = 0x01;
    pub const POWER_MANAGEMENT: u8 = 0x02;
    pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
    pub const ERROR_RECOVERY: u8 = 0x05;
    pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    pub const INTERRUPT_COALESCING: u8 = 0x08;
    pub const INTERRUPT_VECTOR: u8 = 0x09;
    pub const WRITE_ATOMICITY: u8 = 0x0A;
    pub const ASYNC_EVENT_CONFIGURATION: u8 = 0x0B;
    pub const TIMESTAMP: u8 = 0x0E;
    pub const KEEP_ALIVE_TIMER: u8 = 0x0F;
    pub const HOST_BEHAVIOR_SUPPORT: u8 = 0x16;
    pub const IO_COMMAND_SET_PROFILE: u8 = 0x19;
    pub const HOST_IDENTIFIER: u8 = 0x81;
    pub const RESERVATION_NOTIFICATION_MASK: u8 = 0x82;
    pub const RESERVATION_PERSISTENCE: u8 = 0x83;
    pub const NAMESPACE_WRITE_PROTECT: u8 = 0x84;
}

bit_fields! {
    /// Number of Queues, dword 11 of Set Features and dword 0 of the answer (Base 5.27.1.5); both 0's based.
    pub struct NumberOfQueues(u32);
    flags {}
    fields {
        /// I/O submission queues requested or allocated, 0's based.
        submission, with_submission: 15, 0;
        /// I/O completion queues, 0's based.
        completion, with_completion: 31, 16;
    }
}

impl NumberOfQueues {
    /// `queues` I/O queue pairs (1 to 65535), as both counts.
    pub const fn pairs(queues: u16) -> NumberOfQueues {
        let zero_based = queues.saturating_sub(1) as u32;
        NumberOfQueues(0).with_submission(zero_based).with_completion(zero_based)
    }
}

bit_fields! {
    /// Asynchronous Event Configuration, dword 11 (Base 5.27.1.8): which notices are wanted.
    pub struct AsyncEventConfiguration(u32);
    flags {
        /// Namespace Attribute Notices.
        namespace_attribute, with_namespace_attribute: 8;
        firmware_activation, with_firmware_activation: 9;
        /// Asymmetric Namespace Access Change Notices.
        ana_change, with_ana_change: 11;
        /// Discovery Log Page Change Notification.
        discovery_log_change, with_discovery_log_change: 31;
    }
    fields {
        /// SMART / Health critical warnings.
        smart, with_smart: 7, 0;
    }
}

bit_fields! {
    /// Arbitration, dword 11 (Base 5.27.1.1).
    pub struct Arbitration(u32);
    flags {}
    fields {
        /// Arbitration Burst as a power of two; 7 is no limit.
        burst, with_burst: 2, 0;
        low, with_low: 15, 8;
        medium, with_medium: 23, 16;
        high, with_high: 31, 24;
    }
}

bit_fields! {
    /// Volatile Write Cache, dword 11 (Base 5.27.1.4).
    pub struct VolatileWriteCache(u32);
    flags {
        /// Write Cache Enable.
        wce, with_wce: 0;
    }
    fields {}
}

bit_fields! {
    /// Dword 0 of a completed Asynchronous Event Request (Base figure 145).
    pub struct AsyncEvent(u32);
    flags {}
    fields {
        /// Asynchronous Event Type, see [`event_type`].
        event_type, with_event_type: 2, 0;
        /// Asynchronous Event Information: what happened, per type.
        info, with_info: 15, 8;
        /// The log page that says more and that must be read to have the next event of this kind.
        log_page, with_log_page: 23, 16;
    }
}

/// Types of asynchronous events (Base figure 145).
pub mod event_type {
    pub const ERROR: u32 = 0;
    pub const SMART: u32 = 1;
    pub const NOTICE: u32 = 2;
    pub const IO_COMMAND_SET: u32 = 6;
    pub const VENDOR: u32 = 7;
}

impl AsyncEvent {
    /// Namespace Attribute Changed: log 04h (Base figure 148, information 00h).
    pub const NAMESPACE_CHANGED: AsyncEvent = AsyncEvent(0x0004_0002);
    /// Asymmetric Namespace Access Change: log 0Ch (information 03h).
    pub const ANA_CHANGE: AsyncEvent = AsyncEvent(0x000C_0302);
    /// Discovery Log Page Change: log 70h (information F0h).
    pub const DISCOVERY_LOG_CHANGE: AsyncEvent = AsyncEvent(0x0070_F002);
}
