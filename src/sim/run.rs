//! Whole runs.

#![forbid(unsafe_code)]

use std::time::Duration;

use super::care::Scrubbing;
use super::chance::Chance;
use super::layout::{Layout, parse};
use super::life::{Life, Plan, live};
use super::model::Model;
use super::world::Doubt;
use crate::device::{SimDisks, SimFaults, SimSpec};
use crate::pool::PoolOptions;

const MIB: u64 = 1 << 20;

/// What a run shall be.
#[derive(Debug, Clone)]
pub struct Options {
    /// Everything follows from it.
    pub seed: u64,
    /// Operations of hosts and operator together.
    pub operations: u64,
    /// Print what is done to the tree.
    pub trace: bool,
}

/// How a run went.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Operations made.
    pub operations: u64,
    /// Lives of the pool.
    pub lives: u64,
    /// Of these, ended by a power cut.
    pub cuts: u64,
    /// Operations of the devices.
    pub device_operations: u64,
    /// Simulated time.
    pub time: Duration,
    /// Equal for two runs only if they did the same, byte for byte.
    pub digest: u64,
}

/// What was found wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("seed {seed}, life {life}{}: {text}", .step.map(|step| format!(", power cut at device operation {step}")).unwrap_or_default())]
pub struct Failure {
    /// The run's seed.
    pub seed: u64,
    /// In which life of the pool.
    pub life: u64,
    /// The device operation at which the power was cut, when each is tried in turn.
    pub step: Option<u64>,
    /// What.
    pub text: String,
}

/// A pool on simulated disks through all its lives.
struct Run {
    seed: u64,
    disks: SimDisks,
    devices: usize,
    chance: Chance,
    model: Model,
    doubt: Option<Doubt>,
    plan: Plan,
    /// A device on which bits were flipped that may not have been repaired yet.
    rotten: Option<usize>,
    report: Report,
}

impl Run {
    fn new(options: &Options) -> Run {
        let seed = options.seed;
        let mut chance = Chance::new(seed);
        let devices = 1 + chance.below(3) as usize;
        let write_cache = chance.happens(3, 4);
        let slow_reads = chance.happens(1, 4);
        let size = (64 + chance.below(3) * 16) * MIB;
        let specs = (0..devices).map(|_| SimSpec { size, write_cache, latency: true, slow_reads }).collect();
        let shards = 1 + chance.below(5) as u16;
        let create = PoolOptions { shards: Some(shards), ..PoolOptions::default() };
        let plan = Plan {
            reactors: 1 + chance.below(3) as u16,
            hosts: 2 + chance.below(5) as usize,
            operations: 0,
            cache_bytes: 1 + chance.below(2) * (16 << 20),
            snapshots_max: [1, 3, 9][chance.below(3) as usize],
            create: Some(create),
            // In every other run, what is freed is soon used again.
            leave_free: chance.happens(1, 2).then(|| (4 + chance.below(20)) * MIB),
            faults: SimFaults::default(),
            was_closed: true,
            rotten: false,
            repair: false,
            failed: false,
            scrub: Scrubbing::default(),
            empty: false,
            close: false,
            may_cut: false,
            trace: options.trace,
        };
        let layout = Layout::choose(&mut chance);
        Run {
            seed,
            disks: SimDisks::new(chance.next(), specs),
            devices,
            model: Model::new(layout),
            doubt: None,
            rotten: None,
            plan,
            report: Report::default(),
            chance,
        }
    }

    fn live(&mut self) -> Result<Life, Failure> {
        let doubt = self.doubt.take();
        let life = live(&self.disks, self.model.clone(), doubt, &self.plan, &mut self.chance);
        self.report.lives += 1;
        self.report.cuts += u64::from(self.disks.is_cut());
        self.report.operations += life.operations;
        self.report.time += life.time;
        self.report.device_operations = self.disks.operations();
        self.report.digest = self.disks.digest();
        match &life.wrong {
            None => Ok(life),
            Some(text) => Err(self.failure(text.clone())),
        }
    }

    fn failure(&self, text: String) -> Failure {
        Failure { seed: self.seed, life: self.report.lives, step: None, text }
    }

    /// Takes over what a life left behind.
    fn carry(&mut self, life: Life) {
        self.plan.was_closed = life.closed;
        self.plan.scrub = life.scrub;
        if life.repaired {
            (self.rotten, self.plan.repair) = (None, false);
        }
        self.model = life.model;
        self.doubt = life.doubt;
    }

    /// How many blocks of all disks hold the same.
    fn copies(&self, bytes: &[u8]) -> usize {
        let same = |disk: usize| {
            let blocks = self.disks.blocks(disk).into_iter();
            blocks.filter(|block| self.disks.block(disk, *block) == bytes).count()
        };
        (0..self.devices).map(same).sum()
    }

    /// Flips bits of a pool that was closed in order, so that of all metadata one copy stays whole: in blocks of one of
    /// several devices, or in one block. Of data there is no other copy.
    fn rot(&mut self) {
        let device = match self.rotten {
            // Until all is whole again, no other device may suffer; a single one not again.
            Some(_) if self.devices == 1 => return,
            Some(device) => device,
            None => self.chance.below(self.devices as u64) as usize,
        };
        let blocks = self.disks.blocks(device);
        let count = if self.devices > 1 { 1 + self.chance.below(5) } else { 1 };
        let mut label = self.rotten.is_some();
        for _ in 0..count {
            let Some(block) = self.chance.pick(blocks.iter()).copied() else { return };
            let bytes = self.disks.block(device, block);
            if bytes.iter().all(|byte| *byte == bytes[0]) {
                // What only takes up space.
                continue;
            }
            // Both copies of a label lie on the device that it names.
            let is_label = bytes.starts_with(b"RIMROCK");
            if is_label && std::mem::replace(&mut label, true) {
                continue;
            }
            if let Some((version, offset)) = parse(&bytes)
                && version != 0
            {
                // A write in pieces may have left a second one, and nobody can tell which is in use.
                if self.copies(&bytes) > 1 {
                    continue;
                }
                self.model.damaged.insert((version, offset));
            }
            self.rotten = Some(device);
            (self.plan.rotten, self.plan.repair) = (true, true);
            let byte = block * 4096 + self.chance.below(4096);
            self.disks.flip(device, byte, self.chance.below(8) as u32);
        }
    }
}

/// One run at random. The same options make the same run.
pub fn run(options: &Options) -> Result<Report, Failure> {
    let mut run = Run::new(options);
    let kind = run.chance.below(10);
    let (faulty, rots) = (kind == 7 || kind == 8, kind == 6 || kind == 9);
    let mut left = options.operations;
    while left > 0 {
        let last = left < 400;
        run.plan.operations = if last { left } else { 100 + run.chance.below(left.min(2000) - 99) };
        run.plan.close = run.chance.happens(if rots { 4 } else { 1 }, 5);
        run.plan.empty = last;
        run.plan.faults = SimFaults::default();
        if faulty && !last && run.chance.happens(2, 3) && run.plan.create.is_none() {
            run.plan.failed = true;
            run.plan.faults = SimFaults { reads: 300, writes: 200, flushes: 200 };
        }
        // Sometimes the power fails before the pool has even been opened again.
        let soon = run.chance.happens(1, 5);
        let at = 1 + run.chance.below(if soon { 150 } else { 6_000 });
        let may_cut = !run.plan.close && !last && run.plan.create.is_none();
        run.disks.cut_after(may_cut.then_some(at));
        run.plan.may_cut = may_cut;
        let life = run.live()?;
        left = left.saturating_sub(life.operations);
        let (cut, closed) = (run.disks.is_cut(), life.closed);
        run.carry(life);
        run.plan.create = None;
        match cut || run.chance.happens(1, 2) {
            true if !closed => run.disks.power_cycle(),
            _ => run.disks.settle(),
        }
        // A bit flipped twice would be whole again.
        if rots && closed && run.model.damaged.len() < 100 {
            run.rot();
        }
        // The next process may have other cores.
        run.plan.reactors = 1 + run.chance.below(3) as u16;
    }
    Ok(run.report)
}

/// A short run again and again, with the power cut at its first operation of a device, at its second, and so on; each
/// followed by a look at everything. `each` is told how far it is.
pub fn every_step(options: &Options, mut each: impl FnMut(u64, u64)) -> Result<Report, Failure> {
    let prepared = |cut: Option<u64>| {
        let mut run = Run::new(options);
        // The pool is created in a life of its own: a pool that was never answered for may be gone.
        run.live()?;
        run.plan.create = None;
        run.disks.settle();
        run.plan.operations = options.operations;
        run.disks.cut_after(cut);
        let life = run.live()?;
        run.carry(life);
        Ok::<Run, Failure>(run)
    };
    let whole = prepared(None)?;
    let first = {
        let mut run = Run::new(options);
        run.live()?;
        run.disks.operations()
    };
    let steps = whole.disks.operations() - first;
    let mut report = whole.report;
    for step in 1..=steps {
        let at_step = |failure: Failure| Failure { step: Some(step), ..failure };
        each(step, steps);
        let mut run = prepared(Some(step)).map_err(at_step)?;
        run.disks.power_cycle();
        run.plan.operations = 20;
        run.plan.empty = true;
        run.live().map_err(at_step)?;
        report.lives += run.report.lives;
        report.cuts += run.report.cuts;
        report.operations += run.report.operations;
        report.device_operations += run.report.device_operations;
        report.time += run.report.time;
    }
    Ok(report)
}
