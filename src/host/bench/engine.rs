//! The load loop.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use slab::Slab;
use uuid::Uuid;

use super::ledger::Ledger;
use super::pattern::mix;
use super::report::{BenchReport, Tally};
use super::{BenchError, BenchSpec, Progress};
use crate::host::blocking::{self, BlockingController, Machine};
use crate::host::connection::TRANSMIT_SLICES;
use crate::host::controller::BLOCKS_MAX;
use crate::host::{Completion, ControllerOptions, Data, HostError, Namespace};
use crate::nvme::base::nvm;
use crate::nvme::command::ReadWrite;

/// How often a free unit is looked for before the load waits for completions.
const PICK_TRIES: usize = 64;
/// No completion for this long while operations are in flight: the target hangs.
const STALL_LIMIT: Duration = Duration::from_secs(30);
/// Without a completion for this long the loop sleeps until there is something to receive.
const SPIN: Duration = Duration::from_micros(50);
/// The longest such sleep.
const WAIT_MS: u8 = 10;
/// Keep Alive Timeout asked for; the loop sends Keep Alive at a third of it.
const KATO_MS: u32 = 30_000;

/// One queue: its connection and the operations on it.
struct Lane {
    socket: TcpStream,
    machine: Machine,
    operations: Slab<Operation>,
}

struct Operation {
    started: Instant,
    unit: u64,
    version: u32,
    is_write: bool,
    /// Commands of this operation that have not completed.
    parts_left: u32,
}

/// What the next operations are.
struct Picker {
    random: u64,
    next_unit: u64,
}

pub(super) struct Engine<'a> {
    spec: &'a BenchSpec,
    controller: BlockingController,
    ns: Namespace,
    lanes: Vec<Lane>,
    queue_depth: u16,
    /// Operations of `block_bytes` that fit into the range.
    units: u64,
    /// Bytes of one command.
    part_bytes: usize,
    picker: Picker,
    ledger: Option<Ledger>,
    buffers: Vec<Vec<u8>>,
    reads: Tally,
    writes: Tally,
}

impl Engine<'_> {
    pub fn connect(spec: &BenchSpec) -> Result<Engine<'_>, BenchError> {
        let hostid = Uuid::new_v4();
        let defaults = ControllerOptions::new(hostid);
        let options = ControllerOptions {
            queues: spec.queues.max(1),
            // An operation may be several commands.
            depth: super::super::connection::DEPTH_MAX,
            digests: spec.digests,
            kato_ms: KATO_MS,
            hostnqn: spec.hostnqn.clone().unwrap_or(defaults.hostnqn.clone()),
            ..defaults
        };
        let mut controller = blocking::connect(spec.addr, &spec.subnqn, &options)?;
        let ns = blocking::now(controller.namespace(spec.nsid))?;
        let part_bytes = check_sizes(spec, &controller, &ns)?;
        let range = spec.range_bytes.unwrap_or(u64::MAX).min(ns.bytes());
        let units = range / spec.block_bytes as u64;
        if units == 0 {
            return Err(wrong(format!("{range} bytes are less than one operation of {}", spec.block_bytes)));
        }
        let parts = spec.block_bytes.div_ceil(part_bytes);
        let queue_depth = usize::from(spec.queue_depth.max(1)).min(usize::from(controller.depth()) / parts);
        if queue_depth == 0 {
            return Err(wrong(format!(
                "an operation takes {parts} commands, the queue {}",
                controller.depth()
            )));
        }
        let ledger = if spec.verify { Some(Ledger::new(spec, units)?) } else { None };
        let lanes =
            controller.take_io_queues().into_iter().map(Lane::new).collect::<Result<_, HostError>>()?;
        Ok(Engine {
            spec,
            controller,
            ns,
            lanes,
            queue_depth: queue_depth as u16,
            units,
            part_bytes,
            picker: Picker { random: mix(spec.seed), next_unit: 0 },
            ledger,
            buffers: Vec::new(),
            reads: Tally::new(),
            writes: Tally::new(),
        })
    }

    pub fn run(mut self, mut watch: impl FnMut(&Progress)) -> Result<BenchReport, BenchError> {
        if !self.spec.warmup.is_zero() {
            self.load(self.spec.warmup, &mut |_| {})?;
            self.reads.clear();
            self.writes.clear();
        }
        let measured = self.load(self.spec.duration, &mut watch)?;
        let seconds = measured.as_secs_f64();
        let (reads, writes) = (self.reads.report(seconds), self.writes.report(seconds));
        let total = self.reads.merged(&self.writes).report(seconds);
        self.read_back()?;
        let ledger = self.ledger.as_ref();
        let report = BenchReport {
            seconds,
            total,
            reads,
            writes,
            verified_bytes: ledger.map_or(0, |l| l.verified_bytes),
            mismatches: ledger.map_or(0, |l| l.mismatches),
            first_mismatch: ledger.and_then(|l| l.first_mismatch),
            queues: self.lanes.len(),
            queue_depth: self.queue_depth,
        };
        // The I/O queues go first: a controller may wait for them to end.
        self.lanes.clear();
        // A controller that does not answer the goodbye has still been measured.
        let _ = blocking::now(self.controller.shutdown());
        Ok(report)
    }

    /// Keeps all lanes full for `duration`, then lets what is in flight complete. The time until the last completion.
    fn load(&mut self, duration: Duration, watch: &mut dyn FnMut(&Progress)) -> Result<Duration, BenchError> {
        let start = Instant::now();
        let end = start + duration;
        let mut clock = Clock::new(start);
        let mut now = start;
        loop {
            let stopping = now >= end;
            let mut in_flight = 0;
            for index in 0..self.lanes.len() {
                if !stopping {
                    while self.lanes[index].operations.len() < usize::from(self.queue_depth) {
                        let Some((unit, is_write)) = self.pick() else { break };
                        self.start(index, unit, is_write, now)?;
                    }
                }
                let moved = self.turn(index, &mut now)?;
                if moved {
                    clock.last_completion = now;
                }
                in_flight += self.lanes[index].operations.len();
            }
            if stopping && in_flight == 0 {
                return Ok(clock.last_completion - start);
            }
            now = Instant::now();
            if now - clock.last_completion > SPIN {
                self.wait()?;
                now = Instant::now();
            }
            self.tick(&mut clock, now, in_flight, watch)?;
        }
    }

    /// Sleeps until a socket has something, or a moment has passed: what answers slowly needs the core more than a loop.
    fn wait(&self) -> Result<(), BenchError> {
        let mut sockets: Vec<PollFd<'_>> = self
            .lanes
            .iter()
            .map(|lane| {
                let sends = if lane.machine.has_transmit() { PollFlags::POLLOUT } else { PollFlags::empty() };
                PollFd::new(lane.socket.as_fd(), PollFlags::POLLIN | sends)
            })
            .collect();
        match poll(&mut sockets, WAIT_MS) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(HostError::from(std::io::Error::from(error)).into()),
        }
    }

    /// What happens now and then: progress, keep alive, the look for a hanging target.
    fn tick(
        &mut self,
        clock: &mut Clock,
        now: Instant,
        in_flight: usize,
        watch: &mut dyn FnMut(&Progress),
    ) -> Result<(), BenchError> {
        if in_flight > 0 && now - clock.last_completion > STALL_LIMIT {
            return Err(HostError::Timeout { ms: STALL_LIMIT.as_millis() as u64 }.into());
        }
        if now - clock.last_report >= Duration::from_secs(1) {
            let operations = self.reads.operations() + self.writes.operations();
            let bytes = self.reads.bytes() + self.writes.bytes();
            watch(&Progress {
                elapsed: now - clock.start,
                operations: operations - clock.operations,
                bytes: bytes - clock.bytes,
                interval: now - clock.last_report,
            });
            (clock.last_report, clock.operations, clock.bytes) = (now, operations, bytes);
        }
        if now - clock.last_keep_alive >= Duration::from_millis(u64::from(KATO_MS / 3)) {
            blocking::now(self.controller.keep_alive())?;
            clock.last_keep_alive = now;
        }
        Ok(())
    }

    /// The next operation, or `None` when all units looked at are busy.
    fn pick(&mut self) -> Option<(u64, bool)> {
        for _ in 0..PICK_TRIES {
            let unit = if self.spec.workload.is_random {
                self.picker.below(self.units)
            } else {
                let unit = self.picker.next_unit;
                self.picker.next_unit = (unit + 1) % self.units;
                unit
            };
            if self.ledger.as_ref().is_none_or(|ledger| !ledger.is_busy(unit)) {
                let is_write = match self.spec.workload.read_percent {
                    100 => false,
                    0 => true,
                    percent => self.picker.below(100) >= u64::from(percent),
                };
                return Some((unit, is_write));
            }
        }
        None
    }

    /// Submits the commands of one operation.
    fn start(&mut self, lane: usize, unit: u64, is_write: bool, now: Instant) -> Result<(), BenchError> {
        let parts = self.spec.block_bytes.div_ceil(self.part_bytes);
        let version = match &mut self.ledger {
            Some(ledger) => ledger.begin(unit, is_write),
            None => 0,
        };
        let lane = &mut self.lanes[lane];
        let operation = Operation { started: now, unit, version, is_write, parts_left: parts as u32 };
        let token = lane.operations.insert(operation);
        let block = self.ns.block_bytes as usize;
        let first_block = unit * (self.spec.block_bytes / block) as u64;
        for part in 0..parts {
            let at = part * self.part_bytes;
            let len = self.part_bytes.min(self.spec.block_bytes - at);
            let slba = first_block + (at / block) as u64;
            let mut buf = self.buffers.pop().unwrap_or_default();
            if buf.len() != len {
                buf.resize(len, 0);
                noise(&mut buf, slba);
            }
            if let (Some(ledger), true) = (&self.ledger, is_write) {
                for (n, bytes) in buf.chunks_exact_mut(block).enumerate() {
                    ledger.fill(slba + n as u64, version, bytes);
                }
            }
            let rw = ReadWrite::new(self.ns.nsid, slba, (len / block) as u32);
            let (opcode, data) =
                if is_write { (nvm::WRITE, Data::Out(buf)) } else { (nvm::READ, Data::In(buf)) };
            // The command's place within its operation travels in the upper half of the token.
            let token = token as u64 | (part as u64) << 32;
            lane.machine
                .submit(rw.to_sqe(opcode), data, token)
                .map_err(|refused| HostError::from(refused.why))?;
        }
        Ok(())
    }

    /// Moves the bytes of one lane and accounts for what completed; whether anything did. `now` is read again then.
    fn turn(&mut self, lane: usize, now: &mut Instant) -> Result<bool, BenchError> {
        self.lanes[lane].send()?;
        if !self.lanes[lane].receive()? {
            return Ok(false);
        }
        *now = Instant::now();
        let mut completed = false;
        while let Some(done) = self.lanes[lane].machine.poll_completion() {
            completed = true;
            self.finish(lane, done, *now)?;
        }
        Ok(completed)
    }

    fn finish(
        &mut self,
        lane: usize,
        done: Completion<Vec<u8>, Vec<u8>>,
        now: Instant,
    ) -> Result<(), BenchError> {
        let (token, part) = (done.token as u32 as usize, (done.token >> 32) as usize);
        let operation = &mut self.lanes[lane].operations[token];
        let block = self.ns.block_bytes as usize;
        let slba =
            (operation.unit * self.spec.block_bytes as u64 + (part * self.part_bytes) as u64) / block as u64;
        let status = done.cqe.status();
        if !status.is_success() {
            let name = if operation.is_write { "Write" } else { "Read" };
            return Err(BenchError::Command { operation: name, slba, status });
        }
        let buf = match done.data {
            Data::In(buf) => {
                if let Some(ledger) = &mut self.ledger {
                    ledger.check(operation.version, slba, block, &buf);
                }
                buf
            }
            Data::Out(buf) => buf,
            Data::None => Vec::new(),
        };
        self.buffers.push(buf);
        operation.parts_left -= 1;
        if operation.parts_left == 0 {
            let operation = self.lanes[lane].operations.remove(token);
            let tally = if operation.is_write { &mut self.writes } else { &mut self.reads };
            tally.record(now - operation.started, self.spec.block_bytes);
            if let Some(ledger) = &mut self.ledger {
                ledger.end(operation.unit);
            }
        }
        Ok(())
    }

    /// Verify mode: reads every unit that was written once more.
    fn read_back(&mut self) -> Result<(), BenchError> {
        let Some(ledger) = &self.ledger else { return Ok(()) };
        let written = ledger.written();
        let mut written = written.into_iter();
        let mut clock = Clock::new(Instant::now());
        let mut more = true;
        loop {
            let mut now = Instant::now();
            let mut in_flight = 0;
            for lane in 0..self.lanes.len() {
                while more && self.lanes[lane].operations.len() < usize::from(self.queue_depth) {
                    match written.next() {
                        Some(unit) => self.start(lane, unit, false, now)?,
                        None => more = false,
                    }
                }
                if self.turn(lane, &mut now)? {
                    clock.last_completion = now;
                }
                in_flight += self.lanes[lane].operations.len();
            }
            if !more && in_flight == 0 {
                return Ok(());
            }
            self.tick(&mut clock, now, in_flight, &mut |_| {})?;
        }
    }
}

/// When things last happened, and what had been counted at the last report.
struct Clock {
    start: Instant,
    last_completion: Instant,
    last_report: Instant,
    last_keep_alive: Instant,
    operations: u64,
    bytes: u64,
}

impl Clock {
    fn new(start: Instant) -> Clock {
        Clock {
            start,
            last_completion: start,
            last_report: start,
            last_keep_alive: start,
            operations: 0,
            bytes: 0,
        }
    }
}

impl Lane {
    fn new(queue: blocking::Queue) -> Result<Lane, HostError> {
        let (socket, machine) = queue.into_parts();
        socket.set_nonblocking(true)?;
        Ok(Lane { socket, machine, operations: Slab::new() })
    }

    fn send(&mut self) -> Result<(), HostError> {
        while self.machine.has_transmit() {
            let mut slices = [IoSlice::new(&[]); TRANSMIT_SLICES];
            let used = self.machine.transmit_slices(&mut slices);
            match self.socket.write_vectored(&slices[..used]) {
                Ok(0) => return Err(HostError::Closed),
                Ok(n) => self.machine.on_transmitted(n),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// One receive; whether there was anything.
    fn receive(&mut self) -> Result<bool, HostError> {
        let outcome = {
            let mut slices = self.machine.receive_slices();
            self.socket.read_vectored(&mut slices)
        };
        match outcome {
            Ok(0) => Err(HostError::Closed),
            Ok(n) => {
                let judged = self.machine.on_received(n);
                if judged.is_err() {
                    // The termination request is a courtesy.
                    let _ = self.send();
                }
                judged?;
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl Picker {
    /// A number below `limit`, near enough to uniform for a load.
    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(1);
        ((u128::from(mix(self.random)) * u128::from(limit)) >> 64) as u64
    }
}

/// Bytes of one command, after a look at everything that must divide.
fn check_sizes(
    spec: &BenchSpec,
    controller: &BlockingController,
    ns: &Namespace,
) -> Result<usize, BenchError> {
    let block = ns.block_bytes as usize;
    if spec.block_bytes == 0 || !spec.block_bytes.is_multiple_of(block) {
        return Err(wrong(format!(
            "operations of {} bytes are not a multiple of the namespace's blocks of {block} bytes",
            spec.block_bytes
        )));
    }
    if ns.is_read_only && spec.workload.read_percent < 100 {
        return Err(wrong(format!("namespace {} is read-only", ns.nsid)));
    }
    let most = controller.transfer_bytes_max().min(BLOCKS_MAX as usize * block);
    Ok(spec.block_bytes.min(most / block * block).max(block))
}

/// Content that no target can compress or recognise.
fn noise(buf: &mut [u8], salt: u64) {
    for (n, word) in buf.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&mix(mix(salt) ^ n as u64).to_le_bytes());
    }
}

fn wrong(what: String) -> BenchError {
    BenchError::Spec { what }
}
