//! An I/O queue: NVM commands from the wire to jobs, and jobs' results back to the wire.
//!
//! ```text
//!                 ┌──────────────▶ Waiting (memory, or room to send) ──┐
//!  command ──▶ checks                                                  ▼
//!                 ├─ Read ─────────── buffer ─────────────────────▶ Running ──▶ data (+ response)
//!                 ├─ Write, data in the capsule ──────────────────▶ Running ──▶ response
//!                 ├─ Write, data to come ─ buffer ─ R2T ─▶ Data ──▶ Running ──▶ response
//!                 └─ Flush, Write Zeroes ─────────────────────────▶ Running ──▶ response
//! ```
//!
//! Every range is checked before any data moves: `commands` says how, `buffers` what becomes of data and of those who wait,
//! `fused` how two commands become one, `abort` what can still be taken back.
#![forbid(unsafe_code)]

mod abort;
mod buffers;
mod commands;
mod fused;

pub use self::commands::{COPY_BYTES_MAX, COPY_RANGES_MAX};

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use self::buffers::{AfterData, Need};
use self::fused::{First, Pair};
use super::command_ids::CommandIds;
use super::connection::Connection;
use super::controller::{Controller, Traffic};
use super::job::{Done, Job, NamespaceRef, Stop, Work};
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
    /// For data of a fused pair. The slot of its first half.
    PairData {
        namespace: NamespaceRef,
        pair: Box<Pair>,
    },
    /// The slot of the second half, for its data.
    PairHalf {
        pair: u32,
    },
    Running {
        cid: u16,
        /// The other half of a fused pair.
        second: Option<u16>,
        held: Held,
        is_change: bool,
    },
    /// Answered already; the job still runs.
    Lingering {
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
    /// One for each slot, for whatever runs in it.
    stops: Vec<Rc<Stop>>,
    free: Vec<u32>,
    waiting: VecDeque<u32>,
    /// What came last was the first half of a fused pair.
    first: First,
    /// Jobs that run although their commands have been answered.
    lingering: usize,
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
            stops: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            first: First::None,
            lingering: 0,
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
            let (Slot::Waiting { namespace, .. }
            | Slot::Data { namespace, .. }
            | Slot::PairData { namespace, .. }) = &self.slots[slot as usize]
            else {
                continue;
            };
            let now = self.namespaces.get(namespace.nsid as usize - 1).and_then(Option::as_deref);
            if let Some(status) = namespace.verdict(now) {
                self.give_up(conn, slot, status, None);
            }
        }
    }

    /// Commands that have not been answered, or still run.
    pub fn outstanding(&self) -> usize {
        self.ids.len() + self.lingering
    }

    /// No further command is taken until one has ended. A host may have more outstanding than the queue has entries, as
    /// SQHD moves when a command is fetched and not when it ends, but not without limit.
    pub fn is_full(&self) -> bool {
        self.outstanding() >= 2 * self.depth as usize
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
        if sqe.command_flags().fuse() != 0 || !matches!(self.first, First::None) {
            return self.on_fused(conn, sqe, cid, inline);
        }
        self.start_or_refuse(conn, sqe, cid, inline);
    }

    fn start_or_refuse(&mut self, conn: &mut Connection, sqe: &Sqe, cid: u16, inline: Inline<'_>) {
        if let Err(status) = self.start(conn, sqe, cid, inline) {
            self.end(conn, cid, status);
        }
    }

    // ---- the ends --------------------------------------------------------------------------------------------------

    fn run(&mut self, cid: u16, namespace: NamespaceRef, work: Work) {
        self.run_with_second(cid, None, namespace, work);
    }

    fn run_with_second(&mut self, cid: u16, second: Option<u16>, namespace: NamespaceRef, work: Work) {
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
            Work::Compare { expected, scratch, .. } => {
                held.write = memory::footprint(expected.len() + scratch.len());
                self.traffic.reads += 1;
                self.traffic.bytes_read += expected.len() as u64;
            }
            Work::CompareAndWrite { expected, data, scratch, .. } => {
                held.write = memory::footprint(expected.len() + data.len() + scratch.len());
                self.traffic.reads += 1;
                self.traffic.bytes_read += expected.len() as u64;
                self.traffic.writes += 1;
                self.traffic.bytes_written += data.len() as u64;
            }
            Work::Verify { scratch: buf, .. } | Work::Copy { buf, .. } => {
                held.read = memory::footprint(buf.len());
            }
            Work::Flush { .. } | Work::WriteZeroes { .. } | Work::Deallocate { .. } => {}
        }
        self.held.read += held.read;
        self.held.write += held.write;
        let slot = self.occupy(Slot::Running { cid, second, held, is_change: work.is_change() });
        let stop = Rc::clone(&self.stops[slot as usize]);
        stop.reset();
        self.jobs.push(Job { slot, namespace, work, stop });
    }

    /// A job has ended.
    pub fn on_done(&mut self, conn: &mut Connection, done: Done) {
        let (mut cid, second, held) = match self.take_slot(done.slot) {
            Slot::Running { cid, second, held, .. } => (cid, second, held),
            Slot::Lingering { held } => {
                self.held.read -= held.read;
                self.held.write -= held.write;
                self.lingering -= 1;
                return;
            }
            _ => return,
        };
        self.held.read -= held.read;
        self.held.write -= held.write;
        let mut status = done.status;
        if let (Some(second), Some(second_status)) = (second, done.second) {
            self.count_errors(status);
            self.end(conn, cid, status);
            (cid, status) = (second, second_status);
        }
        if let Some(namespace) = done.unflushed
            && self.controller.writes_through()
        {
            // The host has switched the cache off while this ran.
            return self.run(cid, namespace, Work::Flush { others: Vec::new() });
        }
        self.count_errors(status);
        if let Some(buf) = done.buf
            && status.is_success()
        {
            conn.send_data(cid, buf.freeze(), self.success);
            if self.success {
                self.ids.remove(cid);
                return;
            }
        }
        self.end(conn, cid, status);
    }

    fn count_errors(&mut self, status: Status) {
        // That data differs is what a comparison is for.
        if status.sct() == sct::MEDIA && !status.is(Status::COMPARE_FAILURE) {
            self.traffic.media_errors += 1;
        }
    }

    /// Forgets every command that is not running; the connection is over.
    pub fn forget_waiting(&mut self) {
        self.waiting.clear();
        self.spare = None;
        self.is_dry = false;
        self.jobs.clear();
        self.first = First::None;
        for slot in &mut self.slots {
            if !matches!(slot, Slot::Running { .. } | Slot::Lingering { .. }) {
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
                self.stops.push(Rc::default());
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
