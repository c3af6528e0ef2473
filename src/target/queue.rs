//! One queue of one host: the connection, what it has become by Connect, and what it does with each event.
//!
//! ```text
//!   New ──Connect──┬─ QID 0 ─▶ Admin
//!                  └─ QID n ─▶ (Joining, while an old queue of this id is on its way out) ─▶ Io
//!   any ──violation, host gone, told to close, keep alive expired──▶ Over: nothing is read, waiting commands are
//!                                                                   forgotten, running ones end unheard
//! ```
//!
//! Sans-IO as a whole: bytes, results of jobs, messages and the time go in; jobs and bytes to send come out. The only thing
//! it shares with others is its controller.
#![forbid(unsafe_code)]

mod connect;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, info};

use super::admin::AdminQueue;
use super::connection::{Connection, ConnectionLimits, Event};
use super::controller::Controller;
use super::fabrics::ConnectRequest;
use super::inbox::{CloseReason, Inbox, Message};
use super::io::{Inline, IoQueue};
use super::job::{Done, Job};
use super::progress::Progress;
use super::service::Shared;
use super::spec::TransportOptions;
use super::transfer::Arrived;
use crate::memory::DmaSlice;
use crate::nvme::base::{Cqe, OPCODE_FABRICS, Sqe};
use crate::nvme::fabrics::{ConnectData, fctype};
use crate::nvme::status::Status;
use crate::nvme::tcp::{ADMIN_IN_CAPSULE_MAX, Fes};

/// A host that connects must be done with ICReq and Connect in this time.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// A PDU that has begun must have come, or its data must have begun, in this time.
const PDU_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of answers that may wait to be sent before further commands wait. On an I/O queue the data of reads does not
/// count: that has its own window.
const ANSWERS_MAX: usize = 1 << 20;
/// How soon to ask again for memory that was not there.
const MEMORY_POLL: Duration = Duration::from_micros(500);

/// What a connection is made of, for those who serve it.
pub struct Endpoint {
    pub shared: Arc<Shared>,
    pub options: Arc<TransportOptions>,
    /// The listener's address as configured.
    pub listener: SocketAddr,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub reactor: u16,
    pub inbox: Arc<Inbox>,
}

enum Role {
    New,
    /// The data of a Connect is under way.
    ConnectData {
        sqe: Box<Sqe>,
    },
    Joining {
        request: Box<ConnectRequest>,
        since: Instant,
        next_try: Instant,
    },
    Admin(Box<AdminQueue>),
    Io(Box<IoQueue>),
}

/// Whether the connection goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Open,
    /// What is queued is still to be sent, then the connection ends.
    AfterSending,
    /// It ends now.
    Now,
}

pub struct Queue {
    pub conn: Connection,
    endpoint: Endpoint,
    role: Role,
    ending: Ending,
    messages: Vec<Message>,
    /// When the host must be done with Connect.
    connect_by: Instant,
    /// Whether the host sends what it was asked for, and takes what it asked for.
    receiving: Progress,
    sending: Progress,
    /// Since when a PDU is here in part.
    partial_since: Option<Instant>,
    /// When to ask again for memory.
    memory_retry: Instant,
    /// The command that comes next cannot be taken yet.
    is_blocked: bool,
    saw_command: bool,
    saw_traffic: bool,
}

impl Queue {
    pub fn new(endpoint: Endpoint, now: Instant) -> Queue {
        let limits = ConnectionLimits { max_h2c_data: endpoint.options.max_h2c_data };
        Queue {
            conn: Connection::new(limits),
            endpoint,
            role: Role::New,
            ending: Ending::Open,
            messages: Vec::new(),
            connect_by: now + CONNECT_LIMIT,
            receiving: Progress::new(now),
            sending: Progress::new(now),
            partial_since: None,
            memory_retry: now,
            is_blocked: false,
            saw_command: false,
            saw_traffic: false,
        }
    }

    pub fn ending(&self) -> Ending {
        self.ending
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The controller, once there is one.
    pub fn controller(&self) -> Option<&Arc<Controller>> {
        match &self.role {
            Role::Admin(admin) => Some(&admin.controller),
            Role::Io(io) => Some(&io.controller),
            _ => None,
        }
    }

    /// The queue id, once there is one.
    pub fn qid(&self) -> Option<u16> {
        match &self.role {
            Role::Admin(_) => Some(0),
            Role::Io(io) => Some(io.qid),
            _ => None,
        }
    }

    /// What is to be run, for the caller to take.
    pub fn jobs(&mut self) -> Option<&mut Vec<Job>> {
        match &mut self.role {
            Role::Io(io) => Some(io.jobs()),
            Role::Admin(admin) => Some(admin.jobs()),
            _ => None,
        }
    }

    /// What was received last begins with a command that cannot be taken yet: more input is of no use.
    pub fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    // ---- input -----------------------------------------------------------------------------------------------------

    /// Handles what is in `chunk` from `start` on, and returns where the rest begins that must be given again.
    pub fn receive(&mut self, chunk: &DmaSlice, start: usize, now: Instant) -> usize {
        let mut at = start;
        while self.ending == Ending::Open && at < chunk.len() {
            if !self.has_room(&chunk[at..], now) {
                break;
            }
            let parsed = self.conn.parse(&chunk[at..]);
            let base = at;
            at += parsed.consumed;
            if let Some(event) = parsed.event {
                self.on_event(event, chunk, base, now);
            }
            self.check_violation(now);
            if parsed.starved {
                break;
            }
        }
        let is_partial = at < chunk.len() && !self.is_blocked;
        self.partial_since = match self.partial_since {
            Some(since) if is_partial && at == start => Some(since),
            _ => is_partial.then_some(now),
        };
        at
    }

    /// `len` bytes were received straight into [`Connection::payload_room`].
    pub fn payload_received(&mut self, len: usize, now: Instant) {
        self.saw_traffic = true;
        if let Some(Event::DataArrived(arrived)) = self.conn.payload_received(len) {
            self.on_data(arrived, now);
        }
    }

    /// Whether what comes next may be taken. Commands beyond what the queue holds, or can be answered, stay where they
    /// are, unless that could be for ever.
    pub fn has_room(&mut self, next: &[u8], now: Instant) -> bool {
        let room = match self.conn.next_command(next) {
            Some(data) => self.has_room_for(data, now),
            None => true,
        };
        self.is_blocked = !room;
        room
    }

    /// The same for a command that brings up to `data` bytes.
    fn has_room_for(&mut self, data: usize, now: Instant) -> bool {
        let Role::Io(io) = &mut self.role else {
            return self.conn.transmit().pending() <= ANSWERS_MAX;
        };
        if !io.is_full() {
            return self.conn.transmit().pending_copied() <= ANSWERS_MAX && io.has_room_for(&self.conn, data);
        }
        if self.conn.transfers_waiting() == io.outstanding() {
            // Every command waits for data of this host, which is behind the command that cannot be taken.
            self.conn.fail_with(Fes::LIMIT_EXCEEDED);
            self.check_violation(now);
        }
        false
    }

    fn check_violation(&mut self, now: Instant) {
        let Some(violation) = self.conn.violation().filter(|_| self.ending == Ending::Open) else { return };
        if self.endpoint.shared.complaints.may_speak(now) {
            info!(
                peer = %self.endpoint.peer,
                queue = ?self.qid(),
                "host violated the protocol: {} (information {:#x}); connection ends",
                violation.fes,
                violation.fei
            );
        }
        self.end(Ending::AfterSending);
    }

    fn on_event(&mut self, event: Event, chunk: &DmaSlice, base: usize, now: Instant) {
        match event {
            Event::Command { sqe, inline, intact } => {
                let range = base + inline.start..base + inline.end;
                self.on_command(&sqe, Inline { chunk, range, intact }, now);
            }
            Event::DataArrived(arrived) => self.on_data(arrived, now),
            Event::HostTerminated { fes, fei } => {
                if self.endpoint.shared.complaints.may_speak(now) {
                    info!(peer = %self.endpoint.peer, queue = ?self.qid(), "host reports fatal error {fes:#x} ({fei:#x})");
                }
                self.end(Ending::Now);
            }
        }
    }

    fn on_command(&mut self, sqe: &Sqe, inline: Inline<'_>, now: Instant) {
        self.saw_command = true;
        self.saw_traffic = true;
        match &mut self.role {
            Role::Io(io) if sqe.opcode != OPCODE_FABRICS => io.on_command(&mut self.conn, sqe, inline),
            Role::Io(io) => {
                io.break_pair(&mut self.conn);
                self.on_io_fabrics(sqe);
            }
            Role::Admin(admin) => {
                let now_ms = self.endpoint.shared.now_ms(now);
                admin.on_command(&mut self.conn, sqe, inline, now_ms);
            }
            Role::New => self.on_first_command(sqe, inline, now),
            // Nothing may follow a Connect before its answer.
            Role::ConnectData { .. } | Role::Joining { .. } => {
                self.answer(sqe.cid.get(), Status::COMMAND_SEQUENCE_ERROR.with_dnr(), 0);
                self.end(Ending::AfterSending);
            }
        }
    }

    fn on_data(&mut self, arrived: Arrived, now: Instant) {
        self.saw_traffic = true;
        match &mut self.role {
            Role::Io(io) => io.on_data(&mut self.conn, arrived),
            Role::Admin(admin) => admin.on_data(&mut self.conn, arrived, self.endpoint.shared.now_ms(now)),
            Role::ConnectData { sqe } => {
                let sqe = **sqe;
                self.role = Role::New;
                if arrived.intact {
                    self.connect(&sqe, &arrived.buf, now);
                } else {
                    self.answer(sqe.cid.get(), Status::TRANSIENT_TRANSPORT_ERROR, 0);
                }
            }
            Role::New | Role::Joining { .. } => {}
        }
    }

    /// A job has ended.
    pub fn on_done(&mut self, done: Done) {
        self.saw_traffic = true;
        match &mut self.role {
            Role::Io(io) => io.on_done(&mut self.conn, done),
            Role::Admin(admin) => admin.on_done(&mut self.conn, done),
            _ => {}
        }
    }

    fn on_io_fabrics(&mut self, sqe: &Sqe) {
        let status = match sqe.fctype() {
            _ if sqe.command_flags().fuse() != 0 => Status::INVALID_FIELD.with_dnr(),
            fctype::DISCONNECT => Status::SUCCESS,
            fctype::CONNECT => Status::COMMAND_SEQUENCE_ERROR.with_dnr(),
            // Properties are the admin queue's.
            _ => Status::INVALID_OPCODE.with_dnr(),
        };
        self.answer(sqe.cid.get(), status, 0);
        if status.is_success() {
            self.end(Ending::AfterSending);
        }
    }

    fn answer(&mut self, cid: u16, status: Status, result: u64) {
        self.conn.respond(Cqe::new(cid, status).with_result(result));
    }

    // ---- everything else -------------------------------------------------------------------------------------------

    /// What is due besides input: messages, namespaces, commands that wait, events. Once per turn, before input, so that
    /// a command which the host sent after a change finds it made.
    pub fn turn(&mut self, now: Instant) {
        if self.endpoint.inbox.is_flagged() {
            self.read_inbox();
        }
        if self.ending != Ending::Open {
            return;
        }
        match &mut self.role {
            Role::Io(io) => {
                io.refresh_namespaces(&mut self.conn);
                io.resume_waiting(&mut self.conn);
                if std::mem::take(&mut self.saw_command) {
                    io.publish_traffic();
                }
            }
            Role::Admin(admin) => admin.send_events(&mut self.conn),
            Role::New | Role::ConnectData { .. } => {}
            Role::Joining { next_try, .. } if now < *next_try => {}
            Role::Joining { .. } => {
                if let Role::Joining { request, since, .. } = std::mem::replace(&mut self.role, Role::New) {
                    self.connect_io(request, now, Some(since));
                }
            }
        }
    }

    /// Ends the connection if the host has let a time limit pass. Once per turn, after input: what has come in time
    /// counts, however late it is looked at.
    pub fn judge(&mut self, now: Instant) {
        if self.ending != Ending::Open {
            return;
        }
        if std::mem::take(&mut self.saw_traffic)
            && let Some(controller) = self.controller()
        {
            controller.saw_traffic(self.endpoint.shared.now_ms(now));
        }
        if matches!(&self.role, Role::Io(io) if io.is_dry()) {
            self.memory_retry = now + MEMORY_POLL;
        }
        let (owed, arrived) = (self.conn.bytes_owed(), self.conn.bytes_arrived());
        let (pending, sent) = (self.conn.transmit().pending(), self.conn.transmit().sent());
        let receives = self.receiving.keeps_up(now, owed, arrived);
        let sends = self.sending.keeps_up(now, pending, sent);
        let why = match &self.role {
            Role::New | Role::ConnectData { .. } if now >= self.connect_by => "it did not connect in time",
            Role::Admin(admin) if admin.keep_alive_deadline_ms().is_some_and(|ms| self.is_past(now, ms)) => {
                "its keep alive timer has expired"
            }
            _ if !receives => "it does not send the data it was asked for",
            _ if !sends => "it does not take the answers to its commands",
            _ if self.partial_since.is_some_and(|since| now >= since + PDU_LIMIT) => {
                "it does not finish what it has begun to send"
            }
            _ => return,
        };
        if self.endpoint.shared.complaints.may_speak(now) {
            info!(
                peer = %self.endpoint.peer,
                queue = ?self.qid(),
                cntlid = self.controller().map(|controller| controller.cntlid),
                "connection ends: {why}"
            );
        }
        self.end(Ending::Now);
    }

    fn is_past(&self, now: Instant, ms: u64) -> bool {
        self.endpoint.shared.now_ms(now) > ms
    }

    /// Brings what commands hold up to date. Once per turn, after sending.
    pub fn account(&mut self) {
        if let Role::Io(io) = &mut self.role {
            io.account(&self.conn);
        }
    }

    /// When [`Queue::turn`] and [`Queue::judge`] are due although nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let role = match &self.role {
            Role::New | Role::ConnectData { .. } => Some(self.connect_by),
            Role::Joining { next_try, .. } => Some(*next_try),
            Role::Admin(admin) => {
                // One past the deadline, so that it is passed when the timer fires.
                admin.keep_alive_deadline_ms().map(|ms| self.endpoint.shared.instant_of(ms + 1))
            }
            Role::Io(io) => io.is_dry().then_some(self.memory_retry),
        };
        let partial = self.partial_since.map(|since| since + PDU_LIMIT);
        [role, partial, self.receiving.deadline(), self.sending.deadline()].into_iter().flatten().min()
    }

    /// Answers what was asked of this queue and will not be done: it is over.
    pub fn decline_all(&mut self) {
        self.endpoint.inbox.take(&mut self.messages);
        for message in self.messages.drain(..) {
            if let Message::Abort { token, reply_to, .. } = message {
                reply_to.post(Message::AbortDone { token, aborted: false });
            }
        }
    }

    fn read_inbox(&mut self) {
        let mut messages = std::mem::take(&mut self.messages);
        self.endpoint.inbox.take(&mut messages);
        for message in messages.drain(..) {
            match (message, &mut self.role) {
                (Message::Close(reason), _) => {
                    debug!(peer = %self.endpoint.peer, queue = ?self.qid(), ?reason, "connection is closed");
                    self.end(match reason {
                        // The host knows: it has just asked for it. Its last answers still go out.
                        CloseReason::ControllerDisabled => Ending::AfterSending,
                        CloseReason::ControllerGone | CloseReason::Administrative => Ending::Now,
                    });
                }
                (Message::Abort { cid, token, reply_to }, Role::Io(io)) => {
                    let aborted = io.abort(&mut self.conn, cid);
                    reply_to.post(Message::AbortDone { token, aborted });
                }
                (Message::AbortDone { token, aborted }, Role::Admin(admin)) => {
                    admin.on_abort_done(&mut self.conn, token, aborted);
                }
                (Message::Abort { token, reply_to, .. }, _) => {
                    reply_to.post(Message::AbortDone { token, aborted: false });
                }
                (Message::AbortDone { .. }, _) => {}
            }
        }
        self.messages = messages;
    }

    /// The connection ends, for a reason of the caller's: the host has closed it, or it broke.
    pub fn end(&mut self, how: Ending) {
        if self.ending == Ending::Now || how == Ending::Open {
            return;
        }
        self.ending = how;
        if how == Ending::Now {
            self.conn.transmit().clear();
        }
        self.conn.stop();
        if let Role::Io(io) = &mut self.role {
            io.forget_waiting();
            io.controller.leaving(io.qid);
        }
    }
}

const _: () = assert!(size_of::<ConnectData>() <= ADMIN_IN_CAPSULE_MAX as usize);
