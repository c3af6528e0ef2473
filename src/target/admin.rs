//! The admin queue: everything a host says to its controller apart from reading and writing.
//!
//! All of it is answered at once but for four things: Asynchronous Event Requests wait for an event, Abort for the queue
//! of the command it names, a Set Features whose data is not in its capsule for that data, and one that switches the write
//! cache off until what the cache holds is durable. No command here needs
//! memory that I/O could have used up, so that Keep Alive is answered however busy the target is.
//!
//! An event is sent once and then held back until the host has read the log page that goes with it, so that a host that is
//! slow hears of a change once and reads the latest (Base 2.0, 5.2).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::ana::{self, Path};
use super::command_ids::CommandIds;
use super::connection::Connection;
use super::controller::Controller;
use super::discovery::DiscoveryView;
use super::fabrics::ConnectRequest;
use super::features::{self, Effect, Features, Value};
use super::identify::{self, ABORT_LIMIT};
use super::inbox::{CloseReason, Inbox, Message};
use super::io::Inline;
use super::job::{Done, Job, NamespaceRef, Work};
use super::log_page::{self, ErrorLog};
use super::persistent_events::Context;
use super::registers::{Registers, Transition};
use super::service::Shared;
use super::spec::TransportOptions;
use super::transfer::Arrived;
use crate::memory::{DmaBuf, DmaSlice};
use crate::nvme::base::{Cqe, OPCODE_FABRICS, SglKind, Sqe, admin};
use crate::nvme::command::{Abort, Features as FeaturesCommand, GetLogPage, Identify};
use crate::nvme::fabrics::{PropertyCommand, fctype};
use crate::nvme::features::AsyncEvent;
use crate::nvme::identify::IDENTIFY_LEN;
use crate::nvme::log::lid;
use crate::nvme::persistent::action;
use crate::nvme::status::Status;
use crate::nvme::tcp::Fes;

pub struct AdminQueue {
    pub controller: Arc<Controller>,
    shared: Arc<Shared>,
    options: Arc<TransportOptions>,
    inbox: Arc<Inbox>,
    /// The address the host came to.
    local: SocketAddr,
    depth: u32,
    no_sqhd: bool,
    sqhd: u32,
    registers: Registers,
    features: Features,
    keep_alive_ms: u32,
    ids: CommandIds,
    /// Asynchronous Event Requests, oldest first.
    event_requests: Vec<u16>,
    /// An event was sent and its log page not read yet.
    namespace_event_held: bool,
    access_event_held: bool,
    discovery_event_held: bool,
    /// The discovery log as the host last saw it, or would have.
    discovery: DiscoveryView,
    /// Log page 0Ch as the host has begun to read it, groups alone or with their namespaces.
    access_log: Option<(bool, Vec<u8>)>,
    /// Log page 0Dh likewise.
    persistent_log: Context,
    /// Commands whose data is under way, by their token.
    awaiting_data: BTreeMap<u32, Sqe>,
    /// Abort commands that wait for another queue.
    aborts: Vec<u16>,
    jobs: Vec<Job>,
    next_token: u32,
    errors: ErrorLog,
}

/// What became of a command.
enum Outcome {
    Done(u64),
    Data(Vec<u8>),
    /// The beginning of that many bytes, the rest of which are zero.
    Padded(Vec<u8>, usize),
    /// Answered later, or by what it caused.
    Later,
}

type Answer = Result<Outcome, Status>;

const INVALID_FIELD: Status = Status::INVALID_FIELD.with_dnr();

impl AdminQueue {
    pub fn new(
        controller: Arc<Controller>,
        shared: Arc<Shared>,
        options: Arc<TransportOptions>,
        inbox: Arc<Inbox>,
        local: SocketAddr,
        request: &ConnectRequest,
    ) -> AdminQueue {
        let mut features = Features::default();
        let keep_alive_ms = features.set_keep_alive(request.keep_alive_ms);
        controller.set_keep_alive_ms(keep_alive_ms);
        let discovery = match controller.subsystem.is_discovery() {
            true => DiscoveryView::build(&shared, &controller.host.nqn, local),
            false => DiscoveryView::default(),
        };
        AdminQueue {
            registers: Registers::new(options.max_queue_depth),
            controller,
            shared,
            options,
            inbox,
            local,
            depth: request.depth,
            no_sqhd: request.no_sq_flow_control,
            sqhd: 1 % request.depth,
            features,
            keep_alive_ms,
            ids: CommandIds::default(),
            event_requests: Vec::new(),
            namespace_event_held: false,
            access_event_held: false,
            access_log: None,
            persistent_log: Context::default(),
            discovery_event_held: false,
            discovery,
            awaiting_data: BTreeMap::new(),
            aborts: Vec::new(),
            jobs: Vec::new(),
            next_token: 0,
            errors: ErrorLog::default(),
        }
    }

    /// The time at which the association ends unless something moves, if the host has asked for that. Whatever moves on
    /// any queue counts (traffic based keep alive, Base 3.9.2). A host may count its intervals from another moment, so it
    /// is given two of them.
    pub fn keep_alive_deadline_ms(&self) -> Option<u64> {
        (self.keep_alive_ms > 0)
            .then(|| self.controller.last_traffic_ms() + 2 * u64::from(self.keep_alive_ms))
    }

    pub fn on_command(&mut self, conn: &mut Connection, sqe: &Sqe, inline: Inline<'_>, now_ms: u64) {
        self.sqhd = if self.sqhd + 1 >= self.depth { 0 } else { self.sqhd + 1 };
        let cid = sqe.cid.get();
        if !self.ids.insert(cid) {
            return self.answer(conn, cid, Status::COMMAND_ID_CONFLICT.with_dnr(), 0);
        }
        // Event requests stay, so they come on top of what the queue holds.
        if self.ids.len() > 2 * self.depth as usize + usize::from(self.options.max_async_events) {
            return conn.fail_with(Fes::LIMIT_EXCEEDED);
        }
        let answer = self.execute(conn, sqe, inline, now_ms);
        self.finish(conn, sqe, answer);
    }

    fn finish(&mut self, conn: &mut Connection, sqe: &Sqe, answer: Answer) {
        let cid = sqe.cid.get();
        match answer {
            Ok(Outcome::Done(result)) => self.end(conn, cid, Status::SUCCESS, result),
            Ok(Outcome::Data(data)) => {
                conn.send_data(cid, DmaSlice::copy_of(&data), false);
                self.end(conn, cid, Status::SUCCESS, 0);
            }
            Ok(Outcome::Padded(data, len)) => {
                conn.send_padded(cid, DmaSlice::copy_of(&data), len, false);
                self.end(conn, cid, Status::SUCCESS, 0);
            }
            Ok(Outcome::Later) => {}
            Err(status) => {
                self.errors.record(0, cid, status, sqe.nsid.get());
                self.end(conn, cid, status, 0);
            }
        }
    }

    fn execute(&mut self, conn: &mut Connection, sqe: &Sqe, inline: Inline<'_>, now_ms: u64) -> Answer {
        if sqe.command_flags().fuse() != 0 {
            return Err(INVALID_FIELD);
        }
        if !inline.intact {
            return Err(Status::TRANSIENT_TRANSPORT_ERROR);
        }
        if sqe.opcode == OPCODE_FABRICS {
            return self.fabrics(conn, sqe, now_ms);
        }
        if !self.registers.is_ready() {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        match sqe.opcode {
            admin::IDENTIFY => self.identify(sqe),
            admin::GET_LOG_PAGE => self.get_log_page(sqe, now_ms),
            admin::SET_FEATURES => self.set_features(conn, sqe, inline, now_ms),
            admin::GET_FEATURES => self.get_features(sqe, now_ms),
            admin::ASYNC_EVENT_REQUEST => self.request_event(conn, sqe),
            // That a command has come is what it is for.
            admin::KEEP_ALIVE => Ok(Outcome::Done(0)),
            admin::ABORT if !self.controller.subsystem.is_discovery() => self.abort(conn, sqe),
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        }
    }

    // ---- properties ------------------------------------------------------------------------------------------------

    fn fabrics(&mut self, conn: &mut Connection, sqe: &Sqe, now_ms: u64) -> Answer {
        let command = PropertyCommand::from_sqe(sqe);
        match sqe.fctype() {
            fctype::PROPERTY_GET => {
                self.registers.get(&command, self.controller.io_queue_count(), now_ms).map(Outcome::Done)
            }
            fctype::PROPERTY_SET => {
                let transition = self.registers.set(&command, now_ms)?;
                // What the transition ends is answered before the command that asked for it.
                self.apply(conn, transition, now_ms);
                Ok(Outcome::Done(0))
            }
            fctype::CONNECT => Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()),
            fctype::DISCONNECT => Err(Status::INVALID_QUEUE_TYPE.with_dnr()),
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        }
    }

    fn apply(&mut self, conn: &mut Connection, transition: Transition, now_ms: u64) {
        match transition {
            Transition::None => {}
            Transition::Enable => {
                self.controller.set_enabled(true);
                self.controller.subsystem.events.record_reset(self.controller.cntlid, now_ms);
            }
            Transition::Disable | Transition::Shutdown => {
                self.controller.set_enabled(false);
                self.controller.close_io_queues(CloseReason::ControllerDisabled);
                for cid in std::mem::take(&mut self.event_requests) {
                    self.end(conn, cid, Status::ABORTED_SQ_DELETION, 0);
                }
                self.namespace_event_held = false;
                self.access_event_held = false;
                self.access_log = None;
                self.persistent_log = Context::default();
                self.discovery_event_held = false;
            }
        }
    }

    // ---- identify, logs, features ----------------------------------------------------------------------------------

    fn identify(&mut self, sqe: &Sqe) -> Answer {
        check_receive(sqe, IDENTIFY_LEN as u64)?;
        let page = identify::identify(&Identify::parse(sqe), &self.controller, &self.options)?;
        Ok(Outcome::Data(page.to_vec()))
    }

    fn get_log_page(&mut self, sqe: &Sqe, now_ms: u64) -> Answer {
        let command = GetLogPage::parse(sqe);
        let is_discovery = self.controller.subsystem.is_discovery();
        if command.lid == lid::PERSISTENT_EVENT && command.lsp & 3 == action::RELEASE && !is_discovery {
            // Whatever length it names: no data is moved.
            self.persistent_log.act(command.lsp, &self.controller.subsystem, now_ms)?;
            return Ok(Outcome::Done(0));
        }
        let len = command.dwords * 4;
        if len > u64::from(self.options.max_io_size) {
            return Err(INVALID_FIELD);
        }
        check_receive(sqe, len)?;
        let page = match command.lid {
            lid::DISCOVERY if self.controller.subsystem.is_discovery() => {
                // A host that reads on in a log it has begun to read gets that log's rest, and sees by the generation of
                // the next header whether it has changed meanwhile.
                if command.lpo == 0 || self.discovery == DiscoveryView::default() {
                    self.discovery = self.build_discovery();
                }
                if !command.rae {
                    self.discovery_event_held = false;
                }
                self.discovery.page()
            }
            _ if self.controller.subsystem.is_discovery() => log_page::discovery_page(&command)?,
            lid::ANA if self.controller.subsystem.ana_reporting => self.access_log(&command).to_vec(),
            lid::PERSISTENT_EVENT => {
                self.persistent_log.act(command.lsp, &self.controller.subsystem, now_ms)?.to_vec()
            }
            _ => log_page::page(&command, &self.controller, &self.errors)?,
        };
        let part = log_page::cut(&page, &command, len as usize)?;
        // A command that failed has read nothing.
        if command.lid == lid::CHANGED_NAMESPACES && !command.rae {
            self.controller.forget_changes();
            self.namespace_event_held = false;
        }
        if command.lid == lid::ANA && !command.rae {
            self.access_event_held = false;
        }
        Ok(Outcome::Padded(part, len as usize))
    }

    /// Log page 0Ch. A host that reads on gets the rest of what it has begun to read, as with discovery.
    fn access_log(&mut self, command: &GetLogPage) -> &[u8] {
        let groups_only = command.lsp & ana::RETURN_GROUPS_ONLY != 0;
        let is_begun = self.access_log.as_ref().is_some_and(|(begun, _)| *begun == groups_only);
        if command.lpo == 0 || !is_begun {
            let subsystem = &self.controller.subsystem;
            let (map, max) = (subsystem.namespaces(), subsystem.max_namespaces);
            self.access_log = Some((groups_only, self.controller.access.log(&map, groups_only, max)));
        }
        self.access_log.as_ref().map_or(&[], |(_, page)| page)
    }

    fn build_discovery(&self) -> DiscoveryView {
        DiscoveryView::build(&self.shared, &self.controller.host.nqn, self.local)
    }

    fn features_context(&self, now_ms: u64) -> features::Context {
        features::Context {
            is_discovery: self.controller.subsystem.is_discovery(),
            has_write_cache: self.controller.cache_reported.load(Ordering::Relaxed)
                || self.controller.subsystem.namespaces().iter().any(|ns| ns.backend.has_write_cache()),
            io_queues_max: self.options.max_io_queues,
            io_queues: self.controller.io_queue_count(),
            host_id: self.controller.host.id,
            now_ms,
        }
    }

    fn get_features(&mut self, sqe: &Sqe, now_ms: u64) -> Answer {
        let command = FeaturesCommand::parse(sqe);
        self.check_path(&command, false)?;
        let mut context = self.features_context(now_ms);
        context.io_queues_max = self.controller.io_queues_max();
        match self.features.get(&command, &context)? {
            Value::Dword(value) => Ok(Outcome::Done(value.into())),
            Value::Data(data) => {
                check_receive(sqe, data.len() as u64)?;
                Ok(Outcome::Data(data))
            }
        }
    }

    /// Whether the path to the namespace that a feature is asked of allows it.
    fn check_path(&self, command: &FeaturesCommand, sets: bool) -> Result<(), Status> {
        let map = self.controller.subsystem.namespaces();
        let Some(namespace) = map.get(command.nsid) else { return Ok(()) };
        ana::check_feature(self.controller.access.of(namespace.ana_group), command.fid, sets)
    }

    fn set_features(&mut self, conn: &mut Connection, sqe: &Sqe, inline: Inline<'_>, now_ms: u64) -> Answer {
        let need = Features::data_len(FeaturesCommand::parse(sqe).fid);
        if need == 0 {
            return self.set_features_with(sqe, &[], now_ms);
        }
        let len = sqe.dptr.length.get() as usize;
        if len != need {
            return Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr());
        }
        match sqe.data_kind()? {
            SglKind::InCapsule if sqe.dptr.address.get() != 0 => Err(Status::SGL_OFFSET_INVALID.with_dnr()),
            SglKind::InCapsule if inline.range.len() != len => {
                Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr())
            }
            SglKind::InCapsule => self.set_features_with(sqe, &inline.chunk[inline.range], now_ms),
            SglKind::Transport => {
                let token = self.next_token;
                self.next_token = self.next_token.wrapping_add(1);
                conn.request_data(token, sqe.cid.get(), DmaBuf::uninit(len))
                    .map_err(|_| Status::COMMAND_INTERRUPTED)?;
                self.awaiting_data.insert(token, *sqe);
                Ok(Outcome::Later)
            }
            SglKind::Other(_) => Err(Status::SGL_TYPE_INVALID.with_dnr()),
        }
    }

    /// The data of a command is here.
    pub fn on_data(&mut self, conn: &mut Connection, arrived: Arrived, now_ms: u64) {
        let Some(sqe) = self.awaiting_data.remove(&arrived.token) else { return };
        let answer = match arrived.intact {
            true => self.set_features_with(&sqe, &arrived.buf, now_ms),
            false => Err(Status::TRANSIENT_TRANSPORT_ERROR),
        };
        self.finish(conn, &sqe, answer);
    }

    fn set_features_with(&mut self, sqe: &Sqe, data: &[u8], now_ms: u64) -> Answer {
        self.check_path(&FeaturesCommand::parse(sqe), true)?;
        let context = self.features_context(now_ms);
        let effect = self.features.set(&FeaturesCommand::parse(sqe), data, &context)?;
        let cache_off = self.features.write_cache_is_off();
        let was_off = self.controller.cache_off.swap(cache_off, Ordering::SeqCst);
        if cache_off && !was_off && self.empty_caches(sqe.cid.get()) {
            return Ok(Outcome::Later);
        }
        Ok(Outcome::Done(match effect {
            // Event requests that wait are looked at when this command has been answered.
            Effect::None | Effect::EventsConfigured => 0,
            Effect::QueuesGranted(answer, count) => {
                self.controller.set_io_queues_max(count);
                answer.0.into()
            }
            Effect::KeepAlive(ms) => {
                self.keep_alive_ms = ms;
                self.controller.set_keep_alive_ms(ms);
                0
            }
        }))
    }

    /// Makes what hosts wrote so far durable, and answers command `cid` then. False if no namespace has a cache.
    fn empty_caches(&mut self, cid: u16) -> bool {
        let namespaces = self.controller.subsystem.namespaces();
        let cached = namespaces.iter().filter(|namespace| namespace.backend.has_write_cache());
        let mut all: Vec<NamespaceRef> = cached.cloned().map(Path::unconditional).collect();
        let Some(namespace) = all.pop() else { return false };
        self.jobs.push(Job {
            slot: cid.into(),
            namespace,
            work: Work::Flush { others: all },
            stop: Rc::default(),
        });
        true
    }

    /// What is to be run, for the caller to take.
    pub fn jobs(&mut self) -> &mut Vec<Job> {
        &mut self.jobs
    }

    /// A job has ended.
    pub fn on_done(&mut self, conn: &mut Connection, done: Done) {
        self.end(conn, done.slot as u16, done.status, 0);
    }

    // ---- events ----------------------------------------------------------------------------------------------------

    fn request_event(&mut self, conn: &mut Connection, sqe: &Sqe) -> Answer {
        if self.event_requests.len() >= usize::from(self.options.max_async_events) {
            return Err(Status::AER_LIMIT_EXCEEDED.with_dnr());
        }
        self.event_requests.push(sqe.cid.get());
        self.send_events(conn);
        Ok(Outcome::Later)
    }

    /// Sends what the host wants to hear of and has requests for.
    pub fn send_events(&mut self, conn: &mut Connection) {
        let wanted = self.features.events;
        if self.may_send(wanted.namespace_attribute(), self.namespace_event_held)
            && self.controller.take_fresh_change()
        {
            self.namespace_event_held = true;
            self.send_event(conn, AsyncEvent::NAMESPACE_CHANGED);
        }
        if self.may_send(wanted.ana_change(), self.access_event_held) && self.controller.take_access_change()
        {
            self.access_event_held = true;
            self.send_event(conn, AsyncEvent::ANA_CHANGE);
        }
        if self.controller.subsystem.is_discovery()
            && self.may_send(wanted.discovery_log_change(), self.discovery_event_held)
            && self.shared.discovery_generation() != self.discovery.generation
        {
            // Only a change that this host can see is worth its while.
            let now = self.build_discovery();
            let changed = !now.same_entries(&self.discovery);
            self.discovery = now;
            if changed {
                self.discovery_event_held = true;
                self.send_event(conn, AsyncEvent::DISCOVERY_LOG_CHANGE);
            }
        }
    }

    /// Whether an event that the host may want is to be sent when there is one: what is looked for is taken, so there must
    /// be a request to answer.
    fn may_send(&self, is_wanted: bool, is_held: bool) -> bool {
        is_wanted && !is_held && !self.event_requests.is_empty()
    }

    fn send_event(&mut self, conn: &mut Connection, event: AsyncEvent) {
        if !self.event_requests.is_empty() {
            let cid = self.event_requests.remove(0);
            self.end(conn, cid, Status::SUCCESS, event.0.into());
        }
    }

    // ---- abort -----------------------------------------------------------------------------------------------------

    fn abort(&mut self, conn: &mut Connection, sqe: &Sqe) -> Answer {
        const NOT_ABORTED: Answer = Ok(Outcome::Done(1));
        let command = Abort::parse(sqe);
        if self.aborts.len() >= ABORT_LIMIT {
            return Err(Status::ABORT_LIMIT_EXCEEDED);
        }
        if command.sqid == 0 {
            return match self.event_requests.iter().position(|&cid| cid == command.cid) {
                Some(at) => {
                    self.event_requests.remove(at);
                    self.end(conn, command.cid, Status::ABORT_REQUESTED, 0);
                    Ok(Outcome::Done(0))
                }
                None if self.abort_awaited(conn, command.cid) => Ok(Outcome::Done(0)),
                None => NOT_ABORTED,
            };
        }
        let token = u32::from(sqe.cid.get());
        let message = Message::Abort { cid: command.cid, token, reply_to: Arc::clone(&self.inbox) };
        if !self.controller.post_to(command.sqid, message) {
            return NOT_ABORTED;
        }
        self.aborts.push(sqe.cid.get());
        Ok(Outcome::Later)
    }

    /// Aborts a command of this queue whose data is under way.
    fn abort_awaited(&mut self, conn: &mut Connection, cid: u16) -> bool {
        let found = self.awaiting_data.iter().find(|(_, sqe)| sqe.cid.get() == cid);
        let Some(token) = found.map(|(&token, _)| token) else { return false };
        self.awaiting_data.remove(&token);
        conn.abandon_data(token);
        self.end(conn, cid, Status::ABORT_REQUESTED, 0);
        true
    }

    /// The other queue has answered: it does so for every abort, if only when it ends.
    pub fn on_abort_done(&mut self, conn: &mut Connection, token: u32, aborted: bool) {
        let Some(at) = self.aborts.iter().position(|&cid| u32::from(cid) == token) else { return };
        let cid = self.aborts.swap_remove(at);
        self.end(conn, cid, Status::SUCCESS, u64::from(!aborted));
    }

    fn end(&mut self, conn: &mut Connection, cid: u16, status: Status, result: u64) {
        self.ids.remove(cid);
        self.answer(conn, cid, status, result);
    }

    fn answer(&mut self, conn: &mut Connection, cid: u16, status: Status, result: u64) {
        let sqhd = if self.no_sqhd { 0 } else { self.sqhd as u16 };
        conn.respond(Cqe::new(cid, status).with_result(result).with_sqhd(sqhd));
    }
}

/// The host takes at least `len` bytes, moved by the transport.
fn check_receive(sqe: &Sqe, len: u64) -> Result<(), Status> {
    match sqe.data_kind()? {
        SglKind::Transport if u64::from(sqe.dptr.length.get()) >= len => Ok(()),
        SglKind::Transport => Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr()),
        _ => Err(Status::SGL_TYPE_INVALID.with_dnr()),
    }
}
