//! An I/O queue: NVM commands from the wire to jobs, and jobs' results back to the wire.
//!
//! ```text
//!                 ┌──────────────▶ Waiting (memory, or room to send) ──┐
//!  command ──▶ checks                                                  ▼
//!                 ├─ Read ─────────── buffer ─────────────────────▶ Running ──▶ data (+ response)
//!                 ├─ Write, data in the capsule ──────────────────▶ Running ──▶ response
//!                 ├─ Write, data to come ─ buffer ─ R2T ─▶ Data ──▶ Running ──▶ response
//!                 └─ Flush, Write Zeroes, Dataset Management ─────▶ Running ──▶ response
//! ```
//!
//! Every range is checked before any data moves: `commands` says how, `buffers` what becomes of data and of those who wait.
#![forbid(unsafe_code)]

mod buffers;
mod commands;

use std::collections::VecDeque;
use std::sync::Arc;

use self::buffers::{AfterData, Need};
use super::command_ids::CommandIds;
use super::connection::Connection;
use super::controller::{Controller, Traffic};
use super::job::{Done, Job, NamespaceRef, Work};
use super::share::{Admission, Share};
use super::spec::C2hSuccess;
use crate::memory::{self, DmaBuf, DmaSlice};
use crate::nvme::base::{Cqe, Sqe};
use crate::nvme::status::{Status, sct};

enum Slot {
    Free,
    /// For memory.
    Waiting {
        cid: u16,
        namespace: NamespaceRef,
        need: Need,
    },
    /// For data from the host.
    Data {
        cid: u16,
        namespace: NamespaceRef,
        then: AfterData,
    },
    Running {
        cid: u16,
        held: Held,
    },
}

/// The memory that commands hold, by direction, bytes.
#[derive(Clone, Copy, Default)]
struct Held {
    read: usize,
    write: usize,
}

impl Held {
    fn sum(self) -> usize {
        self.read + self.write
    }
}

/// Data that came with the command.
pub struct Inline<'a> {
    pub chunk: &'a DmaSlice,
    pub range: std::ops::Range<usize>,
    pub intact: bool,
}

pub struct IoQueue {
    pub controller: Arc<Controller>,
    pub qid: u16,
    depth: u32,
    /// A read's data also completes it.
    success: bool,
    /// The host has switched SQ flow control off.
    no_sqhd: bool,
    sqhd: u32,
    max_io_size: u32,
    namespaces: Vec<Option<NamespaceRef>>,
    generation: u64,
    ids: CommandIds,
    slots: Vec<Slot>,
    free: Vec<u32>,
    waiting: VecDeque<u32>,
    share: Share,
    /// What all running commands hold.
    held: Held,
    /// For the data of the next command.
    spare: Option<DmaBuf>,
    /// There was no memory when it was last asked for, or others had too much: nobody will say when that has changed.
    is_dry: bool,
    jobs: Vec<Job>,
    /// What was done since the controller was last told.
    traffic: Traffic,
}

impl IoQueue {
    pub fn new(
        controller: Arc<Controller>,
        qid: u16,
        depth: u32,
        no_sqhd: bool,
        success: C2hSuccess,
        max_io_size: u32,
        share: Share,
    ) -> IoQueue {
        let success = match success {
            C2hSuccess::Off => false,
            C2hSuccess::Auto => no_sqhd,
            C2hSuccess::Always => true,
        };
        IoQueue {
            controller,
            qid,
            depth,
            success,
            no_sqhd,
            // Connect was the first command.
            sqhd: 1 % depth,
            max_io_size,
            namespaces: Vec::new(),
            generation: 0,
            ids: CommandIds::default(),
            slots: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            share,
            held: Held::default(),
            spare: None,
            is_dry: false,
            jobs: Vec::new(),
            traffic: Traffic::default(),
        }
    }

    /// Takes over the subsystem's namespaces, and how they are reached, if that has changed. Commands that wait for one
    /// that is gone, or not reached any more, end here.
    pub fn refresh_namespaces(&mut self, conn: &mut Connection) {
        let subsystem = &self.controller.subsystem;
        let generation = subsystem.generation();
        if generation == self.generation {
            return;
        }
        // Read before the map: a map that is newer than its generation is looked at once more.
        self.generation = generation;
        let map = subsystem.namespaces();
        self.namespaces = self.controller.access.reach(&map);
        for slot in 0..self.slots.len() as u32 {
            let (Slot::Waiting { namespace, .. } | Slot::Data { namespace, .. }) = &self.slots[slot as usize]
            else {
                continue;
            };
            let now = self.namespaces.get(namespace.nsid as usize - 1).and_then(Option::as_deref);
            if let Some(status) = namespace.verdict(now) {
                self.give_up(conn, slot, status);
            }
        }
    }

    /// Commands that have not been answered.
    pub fn outstanding(&self) -> usize {
        self.ids.len()
    }

    /// No further command is taken until one has ended. A host may have more outstanding than the queue has entries, as
    /// SQHD moves when a command is fetched and not when it ends, but not without limit.
    pub fn is_full(&self) -> bool {
        self.ids.len() >= 2 * self.depth as usize
    }

    /// A command waits for memory, and nobody will say when there is some.
    pub fn is_dry(&self) -> bool {
        self.is_dry
    }

    /// Whether a command that brings up to `len` bytes can be taken. What is behind it may be what others wait for, so
    /// it is not kept waiting while data of this host is.
    pub fn has_room_for(&mut self, conn: &Connection, len: usize) -> bool {
        if len == 0 || conn.transfers_waiting() > 0 {
            return true;
        }
        let held = self.held_with(conn);
        if !self.is_admitted(held.write, held.sum(), len) {
            return false;
        }
        if self.spare.as_ref().is_none_or(|spare| spare.len() < len) {
            self.spare = DmaBuf::try_uninit(len);
            self.is_dry |= self.spare.is_none();
        }
        self.spare.is_some()
    }

    /// What the queue's commands hold, wherever they are.
    fn held_with(&self, conn: &Connection) -> Held {
        Held {
            read: self.held.read + conn.held_for_sending(),
            write: self.held.write + conn.held_for_receiving(),
        }
    }

    /// Whether the share allows a buffer of `len` bytes in a direction that holds `own` of the queue's `held` bytes.
    fn is_admitted(&mut self, own: usize, held: usize, len: usize) -> bool {
        let admission = self.share.admit(own, held, memory::footprint(len));
        self.is_dry |= admission == Admission::AllTaken;
        admission == Admission::Granted
    }

    /// Brings the share up to date with what commands hold. Once per turn, after sending.
    pub fn account(&mut self, conn: &Connection) {
        // One for each turn, so that no idle queue keeps one.
        self.spare = None;
        self.share.count(self.held_with(conn).sum());
    }

    /// Tells the controller what was done since the last call.
    pub fn publish_traffic(&mut self) {
        if self.traffic != Traffic::default() {
            self.controller.add_traffic(&std::mem::take(&mut self.traffic));
        }
    }

    /// What is to be run, for the caller to take.
    pub fn jobs(&mut self) -> &mut Vec<Job> {
        &mut self.jobs
    }

    pub fn on_command(&mut self, conn: &mut Connection, sqe: &Sqe, inline: Inline<'_>) {
        self.sqhd = if self.sqhd + 1 >= self.depth { 0 } else { self.sqhd + 1 };
        let cid = sqe.cid.get();
        if !self.ids.insert(cid) {
            return self.answer(conn, cid, Status::COMMAND_ID_CONFLICT.with_dnr());
        }
        if let Err(status) = self.start(conn, sqe, cid, inline) {
            self.end(conn, cid, status);
        }
    }

    // ---- the ends --------------------------------------------------------------------------------------------------

    fn run(&mut self, cid: u16, namespace: NamespaceRef, work: Work) {
        let mut held = Held::default();
        match &work {
            Work::Read { buf, .. } => {
                held.read = memory::footprint(buf.len());
                self.traffic.reads += 1;
                self.traffic.bytes_read += buf.len() as u64;
            }
            Work::Write { data, .. } => {
                held.write = memory::footprint(data.len());
                self.traffic.writes += 1;
                self.traffic.bytes_written += data.len() as u64;
            }
            _ => {}
        }
        self.held.read += held.read;
        self.held.write += held.write;
        let slot = self.occupy(Slot::Running { cid, held });
        self.jobs.push(Job { slot, namespace, work });
    }

    /// A job has ended.
    pub fn on_done(&mut self, conn: &mut Connection, done: Done) {
        let Slot::Running { cid, held } = self.take_slot(done.slot) else { return };
        self.held.read -= held.read;
        self.held.write -= held.write;
        if let Some(namespace) = done.unflushed
            && self.controller.writes_through()
        {
            // The host has switched the cache off while this ran.
            return self.run(cid, namespace, Work::Flush { others: Vec::new() });
        }
        if done.status.sct() == sct::MEDIA {
            self.traffic.media_errors += 1;
        }
        if let Some(buf) = done.buf
            && done.status.is_success()
        {
            conn.send_data(cid, buf.freeze(), self.success);
            if self.success {
                self.ids.remove(cid);
                return;
            }
        }
        self.end(conn, cid, done.status);
    }

    /// Aborts a command that has not started. False if it has, or is not there.
    pub fn abort(&mut self, conn: &mut Connection, cid: u16) -> bool {
        let found = self.slots.iter().position(
            |slot| matches!(slot, Slot::Waiting { cid: c, .. } | Slot::Data { cid: c, .. } if *c == cid),
        );
        let Some(slot) = found else { return false };
        self.give_up(conn, slot as u32, Status::ABORT_REQUESTED);
        true
    }

    /// Ends a command that waits.
    fn give_up(&mut self, conn: &mut Connection, slot: u32, status: Status) {
        match self.take_slot(slot) {
            Slot::Waiting { cid, .. } => {
                self.waiting.retain(|&other| other != slot);
                self.end(conn, cid, status);
            }
            Slot::Data { cid, .. } => {
                conn.abandon_data(slot);
                self.end(conn, cid, status);
            }
            Slot::Free | Slot::Running { .. } => {}
        }
    }

    /// Forgets every command that is not running; the connection is over.
    pub fn forget_waiting(&mut self) {
        self.waiting.clear();
        self.spare = None;
        self.is_dry = false;
        self.jobs.clear();
        for slot in &mut self.slots {
            if !matches!(slot, Slot::Running { .. }) {
                *slot = Slot::Free;
            }
        }
        self.namespaces.clear();
    }

    fn end(&mut self, conn: &mut Connection, cid: u16, status: Status) {
        self.ids.remove(cid);
        self.answer(conn, cid, status);
    }

    fn answer(&mut self, conn: &mut Connection, cid: u16, status: Status) {
        let sqhd = if self.no_sqhd { 0 } else { self.sqhd as u16 };
        conn.respond(Cqe::new(cid, status).with_sqhd(sqhd));
    }

    fn occupy(&mut self, content: Slot) -> u32 {
        match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = content;
                slot
            }
            None => {
                self.slots.push(content);
                self.slots.len() as u32 - 1
            }
        }
    }

    fn take_slot(&mut self, slot: u32) -> Slot {
        let Some(content) = self.slots.get_mut(slot as usize) else { return Slot::Free };
        let taken = std::mem::replace(content, Slot::Free);
        if !matches!(taken, Slot::Free) {
            self.free.push(slot);
        }
        taken
    }

    /// Gives back a slot whose content was taken out of it.
    fn free_slot(&mut self, slot: Option<u32>) {
        if let Some(slot) = slot {
            self.free.push(slot);
        }
    }
}
