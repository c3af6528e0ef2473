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

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, info};

use super::admin::AdminQueue;
use super::connection::{Connection, ConnectionLimits, Event};
use super::controller::{Controller, QueueSeat};
use super::fabrics::{self, ConnectRequest, IoConnect, Refusal, STILL_OCCUPIED};
use super::inbox::{CloseReason, Inbox, Message};
use super::io::{Inline, IoQueue};
use super::job::{Done, Job};
use super::service::Shared;
use super::spec::TransportOptions;
use super::transfer::Arrived;
use crate::memory::{DmaBuf, DmaSlice};
use crate::nvme::base::{Cqe, OPCODE_FABRICS, SglKind, Sqe};
use crate::nvme::fabrics::{ConnectData, fctype};
use crate::nvme::status::Status;
use crate::nvme::tcp::{ADMIN_IN_CAPSULE_MAX, Fes};

/// A host that connects must be done with ICReq and Connect in this time.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// How long a Connect waits for a queue of the same id whose host has gone, but whose end was not seen yet.
const OCCUPIED_LIMIT: Duration = Duration::from_millis(300);
/// How long it waits for one that is being drained.
const CLOSING_LIMIT: Duration = Duration::from_secs(5);
/// How often it looks.
const OCCUPIED_POLL: Duration = Duration::from_millis(1);
/// A host that owes data and sends nothing at all for this long is given up, so that it cannot keep buffers for ever.
const HOST_DATA_LIMIT: Duration = Duration::from_secs(60);

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
    New {
        since: Instant,
    },
    /// The data of a Connect is under way.
    ConnectData {
        sqe: Box<Sqe>,
        since: Instant,
    },
    Joining {
        request: Box<ConnectRequest>,
        deadline: Instant,
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
    /// When data that hosts owe was last seen to move, and how much was owed.
    host_data: (Instant, usize),
    saw_command: bool,
}

impl Queue {
    pub fn new(endpoint: Endpoint, now: Instant) -> Queue {
        let limits = ConnectionLimits { max_h2c_data: endpoint.options.max_h2c_data };
        Queue {
            conn: Connection::new(limits),
            endpoint,
            role: Role::New { since: now },
            ending: Ending::Open,
            messages: Vec::new(),
            host_data: (now, 0),
            saw_command: false,
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
            _ => None,
        }
    }

    /// Commands wait for memory that nobody will announce: look again soon.
    pub fn is_waiting(&self) -> bool {
        matches!(&self.role, Role::Io(io) if io.is_waiting())
    }

    // ---- input -----------------------------------------------------------------------------------------------------

    /// Handles what is in `chunk` from `start` on, and returns where the rest begins that must be given again.
    pub fn receive(&mut self, chunk: &DmaSlice, start: usize, now: Instant) -> usize {
        let mut at = start;
        while self.ending == Ending::Open && at < chunk.len() {
            if !self.has_room(&chunk[at..]) {
                break;
            }
            let parsed = self.conn.parse(&chunk[at..]);
            let base = at;
            at += parsed.consumed;
            if let Some(event) = parsed.event {
                self.on_event(event, chunk, base, now);
            }
            self.check_violation();
            if parsed.starved {
                break;
            }
        }
        at
    }

    /// `len` bytes were received straight into [`Connection::payload_room`].
    pub fn payload_received(&mut self, len: usize, now: Instant) {
        if let Some(Event::DataArrived(arrived)) = self.conn.payload_received(len) {
            self.on_data(arrived, now);
        }
    }

    /// Whether what comes next may be taken. Commands beyond what the queue holds stay where they are, unless that could
    /// be for ever.
    fn has_room(&mut self, next: &[u8]) -> bool {
        let Role::Io(io) = &self.role else { return true };
        if !io.is_full() || !self.conn.is_command(next) {
            return true;
        }
        if self.conn.transfers_waiting() == io.outstanding() {
            // Every command waits for data of this host, which is behind the command that cannot be taken.
            self.conn.fail_with(Fes::LIMIT_EXCEEDED);
            self.check_violation();
        }
        false
    }

    fn check_violation(&mut self) {
        if let Some(violation) = self.conn.violation()
            && self.ending == Ending::Open
        {
            info!(
                peer = %self.endpoint.peer,
                queue = ?self.qid(),
                "host violated the protocol: {} (information {:#x}); connection ends",
                violation.fes,
                violation.fei
            );
            self.end(Ending::AfterSending);
        }
    }

    fn on_event(&mut self, event: Event, chunk: &DmaSlice, base: usize, now: Instant) {
        match event {
            Event::Command { sqe, inline, intact } => {
                let range = base + inline.start..base + inline.end;
                self.on_command(&sqe, Inline { chunk, range, intact }, now);
            }
            Event::DataArrived(arrived) => self.on_data(arrived, now),
            Event::HostTerminated { fes, fei } => {
                info!(peer = %self.endpoint.peer, queue = ?self.qid(), "host reports fatal error {fes:#x} ({fei:#x})");
                self.end(Ending::Now);
            }
        }
    }

    fn on_command(&mut self, sqe: &Sqe, inline: Inline<'_>, now: Instant) {
        self.saw_command = true;
        match &mut self.role {
            Role::Io(io) if sqe.opcode != OPCODE_FABRICS => io.on_command(&mut self.conn, sqe, inline),
            Role::Io(_) => self.on_io_fabrics(sqe),
            Role::Admin(admin) => {
                let now_ms = self.endpoint.shared.now_ms(now);
                admin.on_command(&mut self.conn, sqe, inline, now_ms);
            }
            Role::New { since } => {
                let since = *since;
                self.on_first_command(sqe, inline, since, now);
            }
            // Nothing may follow a Connect before its answer.
            Role::ConnectData { .. } | Role::Joining { .. } => {
                self.answer(sqe.cid.get(), Status::COMMAND_SEQUENCE_ERROR.with_dnr(), 0);
                self.end(Ending::AfterSending);
            }
        }
    }

    fn on_data(&mut self, arrived: Arrived, now: Instant) {
        match &mut self.role {
            Role::Io(io) => io.on_data(&mut self.conn, arrived),
            Role::Admin(admin) => admin.on_data(&mut self.conn, arrived, self.endpoint.shared.now_ms(now)),
            Role::ConnectData { sqe, since } => {
                let (sqe, since) = (**sqe, *since);
                self.role = Role::New { since };
                if arrived.intact {
                    self.connect(&sqe, &arrived.buf, now);
                } else {
                    self.answer(sqe.cid.get(), Status::TRANSIENT_TRANSPORT_ERROR, 0);
                }
            }
            Role::New { .. } | Role::Joining { .. } => {}
        }
    }

    /// A job has ended.
    pub fn on_done(&mut self, done: Done) {
        if let Role::Io(io) = &mut self.role {
            io.on_done(&mut self.conn, done);
        }
    }

    // ---- connect ---------------------------------------------------------------------------------------------------

    /// Only a Connect may come first.
    fn on_first_command(&mut self, sqe: &Sqe, inline: Inline<'_>, since: Instant, now: Instant) {
        let cid = sqe.cid.get();
        let refuse = |this: &mut Queue, status| this.answer(cid, status, 0);
        if sqe.opcode != OPCODE_FABRICS || sqe.fctype() != fctype::CONNECT {
            return refuse(self, Status::COMMAND_SEQUENCE_ERROR.with_dnr());
        }
        if !inline.intact {
            return refuse(self, Status::TRANSIENT_TRANSPORT_ERROR);
        }
        let len = sqe.dptr.length.get() as usize;
        if len != size_of::<ConnectData>() {
            return refuse(self, Status::DATA_SGL_LENGTH_INVALID.with_dnr());
        }
        match sqe.dptr.kind() {
            SglKind::InCapsule if sqe.dptr.address.get() != 0 => {
                refuse(self, Status::SGL_OFFSET_INVALID.with_dnr());
            }
            SglKind::InCapsule if inline.range.len() != len => {
                refuse(self, Status::DATA_SGL_LENGTH_INVALID.with_dnr());
            }
            SglKind::InCapsule => self.connect(sqe, &inline.chunk[inline.range], now),
            SglKind::Transport => match self.conn.request_data(0, cid, DmaBuf::uninit(len)) {
                Ok(()) => self.role = Role::ConnectData { sqe: Box::new(*sqe), since },
                Err(_) => refuse(self, Status::COMMAND_INTERRUPTED),
            },
            SglKind::Other(_) => refuse(self, Status::SGL_TYPE_INVALID.with_dnr()),
        }
    }

    fn connect(&mut self, sqe: &Sqe, data: &[u8], now: Instant) {
        let request = match ConnectRequest::parse(sqe, data, &self.endpoint.options) {
            Ok(request) => request,
            Err(refusal) => return self.refuse(sqe.cid.get(), refusal),
        };
        if request.qid == 0 {
            return self.connect_admin(&request, now);
        }
        self.connect_io(Box::new(request), now, None);
    }

    fn connect_admin(&mut self, request: &ConnectRequest, now: Instant) {
        let Endpoint { shared, options, listener, local, inbox, .. } = &self.endpoint;
        let is_discovery = request.subsystem.is_discovery();
        let io_queues_max = if is_discovery { 0 } else { options.max_io_queues };
        let seat = self.seat(request.depth);
        let controller = match fabrics::connect_admin(request, shared, *listener, seat, io_queues_max) {
            Ok(controller) => controller,
            Err(refusal) => return self.refuse(request.cid, refusal),
        };
        info!(
            host = %controller.host.nqn.as_str(),
            subsystem = %controller.subsystem.nqn.as_str(),
            cntlid = controller.cntlid,
            peer = %self.endpoint.peer,
            "host connected"
        );
        controller.saw_command(shared.now_ms(now));
        let cntlid = controller.cntlid;
        let (shared, options) = (Arc::clone(shared), Arc::clone(options));
        let admin = AdminQueue::new(controller, shared, options, Arc::clone(inbox), *local, request);
        self.role = Role::Admin(Box::new(admin));
        self.accept(request, cntlid);
    }

    fn connect_io(&mut self, request: Box<ConnectRequest>, now: Instant, deadline: Option<Instant>) {
        let Endpoint { shared, options, listener, .. } = &self.endpoint;
        match fabrics::connect_io(&request, shared, *listener, &self.seat(request.depth)) {
            IoConnect::Joined(controller) => {
                debug!(
                    cntlid = controller.cntlid,
                    qid = request.qid,
                    depth = request.depth,
                    reactor = self.endpoint.reactor,
                    "I/O queue connected"
                );
                controller.saw_command(shared.now_ms(now));
                let cntlid = controller.cntlid;
                let mut io = IoQueue::new(
                    controller,
                    request.qid,
                    request.depth,
                    request.no_sq_flow_control,
                    options.c2h_success,
                    options.max_io_size,
                );
                io.refresh_namespaces(&mut self.conn);
                self.conn.set_in_capsule_max(options.in_capsule_data_size);
                self.role = Role::Io(Box::new(io));
                self.accept(&request, cntlid);
            }
            IoConnect::Occupied { closing } => {
                let limit = if closing { CLOSING_LIMIT } else { OCCUPIED_LIMIT };
                let deadline = deadline.unwrap_or(now + limit);
                if now >= deadline {
                    self.refuse(request.cid, STILL_OCCUPIED);
                    self.role = Role::New { since: now };
                } else {
                    self.role = Role::Joining { request, deadline, next_try: now + OCCUPIED_POLL };
                }
            }
            IoConnect::Refused(refusal) => {
                self.refuse(request.cid, refusal);
                self.role = Role::New { since: now };
            }
        }
    }

    fn seat(&self, depth: u32) -> QueueSeat {
        QueueSeat {
            inbox: Arc::clone(&self.endpoint.inbox),
            depth,
            reactor: self.endpoint.reactor,
            local: self.endpoint.local,
            peer: self.endpoint.peer,
        }
    }

    fn accept(&mut self, request: &ConnectRequest, cntlid: u16) {
        // FFFFh says that SQ flow control is off, as was asked (Base 6.3).
        let sqhd = if request.no_sq_flow_control { 0xFFFF } else { (1 % request.depth) as u16 };
        let cqe = Cqe::new(request.cid, Status::SUCCESS).with_result(cntlid.into()).with_sqhd(sqhd);
        self.conn.respond(cqe);
    }

    fn refuse(&mut self, cid: u16, refusal: Refusal) {
        debug!(peer = %self.endpoint.peer, status = %refusal.status, parameter = ?refusal.parameter, "connect refused");
        self.answer(cid, refusal.status, refusal.parameter.0.into());
    }

    fn on_io_fabrics(&mut self, sqe: &Sqe) {
        let status = match sqe.fctype() {
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

    /// What is due besides input: messages, namespaces, commands that wait, events, timers. Once per turn.
    pub fn turn(&mut self, now: Instant) {
        if self.endpoint.inbox.is_flagged() {
            self.read_inbox();
        }
        if self.ending != Ending::Open {
            return;
        }
        let saw_command = std::mem::take(&mut self.saw_command);
        match &mut self.role {
            Role::Io(io) => {
                io.refresh_namespaces(&mut self.conn);
                if io.is_waiting() {
                    io.resume_waiting(&mut self.conn);
                }
                if saw_command {
                    io.controller.saw_command(self.endpoint.shared.now_ms(now));
                    io.publish_traffic();
                }
                self.watch_host_data(now);
            }
            Role::Admin(admin) => {
                if saw_command {
                    admin.controller.saw_command(self.endpoint.shared.now_ms(now));
                }
                admin.send_events(&mut self.conn);
                let now_ms = self.endpoint.shared.now_ms(now);
                if admin.keep_alive_deadline_ms().is_some_and(|deadline| now_ms > deadline) {
                    info!(
                        host = %admin.controller.host.nqn.as_str(),
                        cntlid = admin.controller.cntlid,
                        "keep alive timer expired; the association ends"
                    );
                    self.end(Ending::Now);
                }
            }
            Role::New { since } | Role::ConnectData { since, .. } if now >= *since + CONNECT_LIMIT => {
                debug!(peer = %self.endpoint.peer, "host did not connect in time");
                self.end(Ending::Now);
            }
            Role::New { .. } | Role::ConnectData { .. } => {}
            Role::Joining { next_try, .. } if now < *next_try => {}
            Role::Joining { .. } => {
                let taken = std::mem::replace(&mut self.role, Role::New { since: now });
                if let Role::Joining { request, deadline, .. } = taken {
                    self.connect_io(request, now, Some(deadline));
                }
            }
        }
    }

    /// When [`Queue::turn`] is due although nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.role {
            Role::New { since } | Role::ConnectData { since, .. } => Some(*since + CONNECT_LIMIT),
            Role::Joining { next_try, .. } => Some(*next_try),
            Role::Admin(admin) => {
                // One past the deadline, so that it is passed when the timer fires.
                admin.keep_alive_deadline_ms().map(|ms| self.endpoint.shared.instant_of(ms + 1))
            }
            Role::Io(_) if self.conn.waiting_bytes() > 0 => Some(self.host_data.0 + HOST_DATA_LIMIT),
            Role::Io(_) => None,
        }
    }

    fn watch_host_data(&mut self, now: Instant) {
        let owed = self.conn.bytes_owed();
        if owed == 0 || owed != self.host_data.1 {
            self.host_data = (now, owed);
        } else if now >= self.host_data.0 + HOST_DATA_LIMIT {
            info!(peer = %self.endpoint.peer, "host does not send the data it was asked for; connection ends");
            self.end(Ending::Now);
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
        if let Role::Admin(admin) = &mut self.role {
            admin.on_queue_gone(&mut self.conn);
        }
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
