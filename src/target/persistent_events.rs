//! The Persistent Event log: what happened to a subsystem, for hosts that ask later (Base 2.0, 5.16.1.14).
//!
//! It is the subsystem's, so that every controller shows the same, and kept in memory: it ends with the daemon. A host
//! reads it in a *reporting context*, a copy of the log as it was, so that what happens meanwhile tears nothing.
//!
//! ```text
//!   none ──establish and read──▶ context ──read …──▶ context ──release, or a reset──▶ none
//! ```
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use zerocopy::{FromZeros, IntoBytes};

use super::namespace::Namespace;
use super::subsystem::Subsystem;
use crate::nvme::log::lid;
use crate::nvme::persistent::{
    ChangeNamespace, EventHeader, LogHeader, ResetDescriptor, action, event_type, sel,
};
use crate::nvme::status::Status;

/// Events that are kept; older ones go.
const EVENTS_MAX: usize = 256;
/// PELS: the log is never longer than one unit of 64 KiB.
pub const SIZE_MAX_64KIB: u32 = 1;
const _: () = {
    let each = size_of::<EventHeader>() + size_of::<ChangeNamespace>();
    assert!(size_of::<LogHeader>() + EVENTS_MAX * each <= 65536);
};

/// The events of a subsystem, oldest first.
#[derive(Default)]
pub struct PersistentEvents {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    events: VecDeque<Vec<u8>>,
    /// Counts all that ever were.
    count: u64,
}

impl PersistentEvents {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A controller was enabled, at first or after a reset.
    pub fn record_reset(&self, cntlid: u16, now_ms: u64) {
        let mut reset = ResetDescriptor::new_zeroed();
        reset.controller_id = cntlid.into();
        reset.power_on_ms = now_ms.into();
        reset.controller_timestamp = now_ms.into();
        let mut data = revision().to_vec();
        data.extend_from_slice(reset.as_bytes());
        self.record(event_type::RESET, cntlid, now_ms, &data);
    }

    /// Namespace `nsid` was added, or is gone. No host did it, so no controller is named.
    pub fn record_namespace(&self, nsid: u32, new: Option<&Namespace>, now_ms: u64) {
        let mut change = ChangeNamespace::new_zeroed();
        change.command = if new.is_some() { sel::CREATE } else { sel::DELETE }.into();
        change.nsid = nsid.into();
        if let Some(namespace) = new {
            change.nsze = namespace.blocks().into();
            change.ncap = namespace.blocks().into();
            change.nmic = 1;
            change.anagrpid = namespace.ana_group.into();
        }
        self.record(event_type::CHANGE_NAMESPACE, NO_CONTROLLER, now_ms, change.as_bytes());
    }

    fn record(&self, kind: u8, cntlid: u16, now_ms: u64, data: &[u8]) {
        let mut header = EventHeader::new_zeroed();
        header.event_type = kind;
        header.revision = 1;
        header.header_len = EventHeader::LEN_FIELD;
        header.controller_id = cntlid.into();
        header.timestamp = (now_ms & ((1 << 48) - 1)).into();
        header.event_len = (data.len() as u16).into();
        let mut event = header.as_bytes().to_vec();
        event.extend_from_slice(data);
        let mut state = self.state();
        if state.events.len() == EVENTS_MAX {
            state.events.pop_front();
        }
        state.events.push_back(event);
        state.count += 1;
    }

    /// The whole log as it is now.
    fn page(&self, subsystem: &Subsystem, now_ms: u64) -> Vec<u8> {
        let state = self.state();
        let len: usize = state.events.iter().map(Vec::len).sum();
        let mut header = LogHeader::new_zeroed();
        header.lid = lid::PERSISTENT_EVENT;
        header.events = (state.events.len() as u32).into();
        header.log_len = ((size_of::<LogHeader>() + len) as u64).into();
        header.revision = LogHeader::REVISION;
        header.header_len = LogHeader::LEN_FIELD.into();
        header.timestamp = (now_ms & ((1 << 48) - 1)).into();
        header.power_on_hours = u128::from(now_ms / 3_600_000).into();
        set_text(&mut header.serial_number, &subsystem.serial_number);
        set_text(&mut header.model_number, &subsystem.model_number);
        header.subnqn = subsystem.nqn.to_field();
        header.generation = (state.count as u16).into();
        header.context = LogHeader::CONTEXT_EXISTS.into();
        for kind in [event_type::RESET, event_type::CHANGE_NAMESPACE] {
            header.supported[usize::from(kind / 8)] |= 1 << (kind % 8);
        }
        let mut page = header.as_bytes().to_vec();
        // The newest first (Base 5.16.1.14: in the order from the most recent to the oldest).
        page.extend(state.events.iter().rev().flatten());
        page
    }
}

/// CNTLID of an event that no controller is the cause of.
const NO_CONTROLLER: u16 = 0xFFFF;

fn revision() -> [u8; 8] {
    let mut field = [0; 8];
    set_text(&mut field, env!("CARGO_PKG_VERSION"));
    field
}

fn set_text(field: &mut [u8], text: &str) {
    crate::nvme::identify::IdentifyController::set_text(field, text);
}

/// What a controller's host has begun to read.
#[derive(Default)]
pub struct Context {
    page: Option<Vec<u8>>,
}

impl Context {
    /// Does what the command's Log Specific Parameter says and gives the log; nothing after a release.
    pub fn act(&mut self, lsp: u8, subsystem: &Subsystem, now_ms: u64) -> Result<&[u8], Status> {
        match (lsp & 3, &self.page) {
            (action::READ, Some(_)) => {}
            (action::READ, None) | (action::ESTABLISH_AND_READ, Some(_)) => {
                return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr());
            }
            (action::ESTABLISH_AND_READ, None) => self.page = Some(subsystem.events.page(subsystem, now_ms)),
            (action::RELEASE, _) => self.page = None,
            _ => return Err(Status::INVALID_FIELD.with_dnr()),
        }
        Ok(self.page.as_deref().unwrap_or_default())
    }
}
