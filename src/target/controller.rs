//! A controller: what one host holds on one subsystem, shared by the tasks of its queues.
//!
//! The admin queue's task owns everything that commands change (see [`super::admin`]); here is only what other threads need
//! to see or to say: the I/O queues and how to close them, which namespaces have changed, and when traffic was last seen.
//!
//! ```text
//!   admin Connect ─▶ live ──(admin connection ends, keep alive runs out, host or subsystem removed)─▶ closing ─▶ gone
//!                     │ I/O Connect adds a queue                             every queue is told to close
//!                     └─ CC.EN 1→0, or shutdown: every I/O queue is told to close, RDY/SHST follow when the last is gone
//! ```
//!
//! Its id is given out again only when the last of its queues, and with it the last command, is gone.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use super::ana::Access;
use super::inbox::{CloseReason, Inbox, Message};
use super::share::Reserve;
use super::spec::{ControllerView, QueueView};
use super::subsystem::Subsystem;
use crate::nvme::nqn::Nqn;

/// The changed namespaces that log page 04h can list; more are shown as FFFFFFFFh (Base 2.0, 5.16.1.5).
pub const CHANGED_NAMESPACES_MAX: usize = 1024;

/// Who a host says it is. Both parts are compared on every Connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostIdentity {
    pub nqn: Nqn,
    pub id: [u8; 16],
}

/// Where a queue lives.
#[derive(Debug, Clone)]
pub struct QueueSeat {
    pub inbox: Arc<Inbox>,
    /// Entries.
    pub depth: u32,
    pub reactor: u16,
    pub local: SocketAddr,
    pub peer: SocketAddr,
}

pub struct Controller {
    pub cntlid: u16,
    pub subsystem: Arc<Subsystem>,
    pub host: HostIdentity,
    /// The listener that all its connections came in by.
    pub listener: SocketAddr,
    /// How that listener reaches the namespaces.
    pub access: Arc<Access>,
    admin: QueueSeat,
    /// I/O queues granted; queue ids run from 1 to this.
    io_queues_max: AtomicU16,
    keep_alive_ms: AtomicU32,
    /// CC.EN is set and CSTS.RDY with it: I/O queues may connect.
    enabled: AtomicBool,
    /// The host was told that there is a volatile write cache, so it flushes when it wants durability.
    pub cache_reported: AtomicBool,
    /// The host has switched the cache off.
    pub cache_off: AtomicBool,
    /// What its queues have of the last memory for data.
    pub reserve: Reserve,
    traffic: TrafficCounters,
    closing: AtomicBool,
    /// When anything last moved on any queue, milliseconds on the target's clock.
    last_traffic_ms: AtomicU64,
    io_queues: Mutex<BTreeMap<u16, IoQueue>>,
    changes: Mutex<Changes>,
}

struct IoQueue {
    seat: QueueSeat,
    closing: bool,
}

/// What went through the queues of a controller, or of one queue since it last said so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    pub reads: u64,
    pub writes: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub media_errors: u64,
}

#[derive(Default)]
struct TrafficCounters {
    reads: AtomicU64,
    writes: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    media_errors: AtomicU64,
}

#[derive(Default)]
struct Changes {
    namespaces: BTreeSet<u32>,
    overflow: bool,
    /// Something was added since the host was last told.
    fresh: bool,
    /// Counts additions, and how many of them the host has read last.
    added: u64,
    read: u64,
    /// How namespaces are reached has changed since the host was last told.
    access: bool,
}

/// Why an I/O queue cannot join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinError {
    /// A queue with this id is there and alive.
    Exists,
    /// A queue with this id is there, but about to go.
    Closing,
    OutOfRange,
    NotEnabled,
    ControllerClosing,
}

impl Controller {
    pub(super) fn new(
        cntlid: u16,
        subsystem: Arc<Subsystem>,
        host: HostIdentity,
        listener: SocketAddr,
        access: Arc<Access>,
        admin: QueueSeat,
        io_queues_max: u16,
    ) -> Controller {
        Controller {
            cntlid,
            subsystem,
            host,
            listener,
            access,
            admin,
            io_queues_max: AtomicU16::new(io_queues_max),
            keep_alive_ms: AtomicU32::new(0),
            enabled: AtomicBool::new(false),
            cache_reported: AtomicBool::new(false),
            cache_off: AtomicBool::new(false),
            reserve: Reserve::default(),
            traffic: TrafficCounters::default(),
            closing: AtomicBool::new(false),
            last_traffic_ms: AtomicU64::new(0),
            io_queues: Mutex::default(),
            changes: Mutex::default(),
        }
    }

    fn queues(&self) -> MutexGuard<'_, BTreeMap<u16, IoQueue>> {
        self.io_queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- for its queues --------------------------------------------------------------------------------------------

    pub fn set_enabled(&self, enabled: bool) {
        self.enabled.store(enabled, Ordering::Release);
    }

    pub fn io_queues_max(&self) -> u16 {
        self.io_queues_max.load(Ordering::Relaxed)
    }

    pub fn set_io_queues_max(&self, count: u16) {
        self.io_queues_max.store(count, Ordering::Relaxed);
    }

    pub fn set_keep_alive_ms(&self, ms: u32) {
        self.keep_alive_ms.store(ms, Ordering::Relaxed);
    }

    /// A command, its data or its end was seen; any queue says so, at most once per turn.
    pub fn saw_traffic(&self, now_ms: u64) {
        self.last_traffic_ms.store(now_ms, Ordering::Relaxed);
    }

    pub fn last_traffic_ms(&self) -> u64 {
        self.last_traffic_ms.load(Ordering::Relaxed)
    }

    /// Whether acknowledged writes must be durable: the host does not know of a cache, or does not want it.
    pub fn writes_through(&self) -> bool {
        // In one order with what is acknowledged: a write that ends now is either seen by the flush that follows the
        // switch, or sees the switch.
        !self.cache_reported.load(Ordering::Relaxed) || self.cache_off.load(Ordering::SeqCst)
    }

    /// Adds what a queue has done; called at most once per turn of it.
    pub fn add_traffic(&self, traffic: &Traffic) {
        let add = |counter: &AtomicU64, value| {
            if value > 0 {
                counter.fetch_add(value, Ordering::Relaxed);
            }
        };
        add(&self.traffic.reads, traffic.reads);
        add(&self.traffic.writes, traffic.writes);
        add(&self.traffic.bytes_read, traffic.bytes_read);
        add(&self.traffic.bytes_written, traffic.bytes_written);
        add(&self.traffic.media_errors, traffic.media_errors);
    }

    pub fn traffic(&self) -> Traffic {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            reads: get(&self.traffic.reads),
            writes: get(&self.traffic.writes),
            bytes_read: get(&self.traffic.bytes_read),
            bytes_written: get(&self.traffic.bytes_written),
            media_errors: get(&self.traffic.media_errors),
        }
    }

    pub fn join(&self, qid: u16, seat: QueueSeat) -> Result<(), JoinError> {
        if qid == 0 || qid > self.io_queues_max() {
            return Err(JoinError::OutOfRange);
        }
        let mut queues = self.queues();
        // Under the lock that closing takes too, so that no queue joins behind its back.
        if self.closing.load(Ordering::Relaxed) {
            return Err(JoinError::ControllerClosing);
        }
        match queues.get(&qid) {
            Some(queue) if queue.closing => return Err(JoinError::Closing),
            Some(_) => return Err(JoinError::Exists),
            None => {}
        }
        if !self.enabled.load(Ordering::Acquire) {
            return Err(JoinError::NotEnabled);
        }
        queues.insert(qid, IoQueue { seat, closing: false });
        Ok(())
    }

    /// The queue's connection has ended but commands are still running.
    pub fn leaving(&self, qid: u16) {
        if let Some(queue) = self.queues().get_mut(&qid) {
            queue.closing = true;
        }
    }

    /// The queue and its last command are gone.
    pub fn left(&self, qid: u16) {
        self.queues().remove(&qid);
        self.admin.inbox.nudge();
    }

    pub fn io_queue_count(&self) -> usize {
        self.queues().len()
    }

    /// Gives a message to an I/O queue; false if there is none, or it is about to go. What was given is read, at the
    /// latest when the queue has left: it is posted under the lock that leaving takes too.
    pub fn post_to(&self, qid: u16, message: Message) -> bool {
        match self.queues().get(&qid) {
            Some(queue) if !queue.closing => {
                queue.seat.inbox.post(message);
                true
            }
            _ => false,
        }
    }

    /// Tells every I/O queue to end.
    pub fn close_io_queues(&self, reason: CloseReason) {
        for queue in self.queues().values_mut() {
            queue.closing = true;
            queue.seat.inbox.post(Message::Close(reason));
        }
    }

    /// No queue joins any more, and all there are end. The admin queue's task does this when its connection ends.
    pub fn close_all(&self, reason: CloseReason) {
        self.closing.store(true, Ordering::Relaxed);
        self.close_io_queues(reason);
    }

    // ---- for everyone else -----------------------------------------------------------------------------------------

    /// Cuts the association: the admin queue ends, and every other queue with it.
    pub fn disconnect(&self, reason: CloseReason) {
        self.close_all(reason);
        self.admin.inbox.post(Message::Close(reason));
    }

    /// Makes the admin queue's task look at the discovery log.
    pub fn nudge(&self) {
        self.admin.inbox.nudge();
    }

    pub fn namespaces_changed(&self, nsids: &[u32]) {
        let mut changes = self.changes();
        for &nsid in nsids {
            if changes.namespaces.len() < CHANGED_NAMESPACES_MAX || changes.namespaces.contains(&nsid) {
                changes.namespaces.insert(nsid);
            } else {
                changes.overflow = true;
            }
        }
        changes.fresh = true;
        changes.added += 1;
        drop(changes);
        self.nudge_all();
    }

    /// How namespaces are reached has changed.
    pub fn access_changed(&self) {
        self.changes().access = true;
        self.nudge_all();
    }

    fn nudge_all(&self) {
        self.admin.inbox.nudge();
        for queue in self.queues().values() {
            queue.seat.inbox.nudge();
        }
    }

    /// Whether that was so since this was last asked.
    pub fn take_access_change(&self) -> bool {
        std::mem::take(&mut self.changes().access)
    }

    /// Whether namespaces changed since this was last asked.
    pub fn take_fresh_change(&self) -> bool {
        std::mem::take(&mut self.changes().fresh)
    }

    /// The namespaces that changed, in rising order, `None` when there were too many to list.
    pub fn changed_namespaces(&self) -> Option<Vec<u32>> {
        let mut changes = self.changes();
        changes.read = changes.added;
        (!changes.overflow).then(|| changes.namespaces.iter().copied().collect())
    }

    /// The host has read all of it: nothing is left to tell it about, unless something was added meanwhile.
    pub fn forget_changes(&self) {
        let mut changes = self.changes();
        if changes.read == changes.added {
            changes.namespaces.clear();
            changes.overflow = false;
            changes.fresh = false;
        }
    }

    pub fn view(&self) -> ControllerView {
        ControllerView {
            cntlid: self.cntlid,
            hostnqn: self.host.nqn.as_str().into(),
            hostid: Uuid::from_bytes(self.host.id),
            keep_alive_ms: self.keep_alive_ms.load(Ordering::Relaxed),
            enabled: self.enabled.load(Ordering::Relaxed),
            io_queues: self.io_queue_count(),
        }
    }

    pub fn queue_views(&self) -> Vec<QueueView> {
        let view = |qid: u16, seat: &QueueSeat| QueueView {
            cntlid: self.cntlid,
            qid,
            hostnqn: self.host.nqn.as_str().into(),
            depth: seat.depth,
            reactor: seat.reactor,
            local: seat.local,
            peer: seat.peer,
        };
        let mut views = vec![view(0, &self.admin)];
        views.extend(self.queues().iter().map(|(&qid, queue)| view(qid, &queue.seat)));
        views
    }
}
