//! What the tasks of one life of the pool share: the model, the pool, what is under way, and what was found wrong.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use super::care::Scrubbing;
use super::chance::Chance;
use super::layout::{BLOCK, Version, parse};
use super::life::Plan;
use super::model::{Model, Moment};
use crate::device::{IoError, SimDisks};
use crate::memory::DmaBuf;
use crate::pool::{Pool, PoolError, PoolErrorKind, PoolEvent, PoolManager, Volume};

/// An operation on the tree that was asked for and not answered.
#[derive(Debug, Clone)]
pub(super) enum Doubt {
    Create {
        name: String,
        size: u64,
        write_cache: bool,
    },
    /// Pairs of (volume, snapshot).
    Snapshots {
        pairs: Vec<(String, String)>,
        asked: Moment,
    },
    Clone {
        snapshot: String,
        name: String,
    },
    Rollback {
        volume: String,
        snapshot: String,
        keep: Option<String>,
        asked: Moment,
    },
    Delete {
        name: String,
    },
    Rename {
        name: String,
        new: String,
    },
    Resize {
        name: String,
        size: u64,
    },
    /// It changes nothing that the model knows.
    Promote,
    Pin {
        name: String,
        by: String,
        pinned: bool,
    },
}

pub(super) struct World {
    pub model: RefCell<Model>,
    pub doubt: RefCell<Option<Doubt>>,
    pub manager: PoolManager,
    pub pool: RefCell<Option<Arc<Pool>>>,
    /// Operations still to be made.
    pub left: Cell<u64>,
    /// The first thing found wrong.
    pub wrong: RefCell<Option<String>>,
    /// A device failed in a way that ends this life of the pool.
    pub broken: Cell<bool>,
    /// The tasks of this life have ended.
    pub finished: Cell<bool>,
    /// The pool was closed in order.
    pub closed: Cell<bool>,
    /// The power supply, when it may fail in this life.
    pub power: Option<SimDisks>,
    /// Devices fail now and then.
    pub faulty: bool,
    /// Snapshots to keep at most.
    pub snapshots_max: usize,
    /// Say what is done to the tree.
    pub trace: bool,
    /// Bits were flipped.
    pub rotten: Cell<bool>,
    /// Devices have failed at any time.
    pub failed: bool,
    /// Bits were flipped, and a check has repaired what can be repaired since.
    pub repaired: Cell<bool>,
    /// How the scrub must stand.
    pub scrub: Cell<Scrubbing>,
    /// When the scrub was started and how far it was, by the last answer.
    pub scrubbed: Cell<(Option<u64>, u64)>,
    /// What the pool told.
    pub events: Arc<Mutex<Vec<PoolEvent>>>,
    /// A volume whose rollback to this snapshot, asked for then, was not answered, and may have been made or not.
    pub either: RefCell<Option<(String, String, Moment)>>,
    /// Hosts that use each volume now, and volumes that no host may begin to use.
    gates: RefCell<BTreeMap<String, Gate>>,
    seeds: RefCell<Chance>,
}

#[derive(Default)]
struct Gate {
    inside: usize,
    shut: bool,
}

/// While it lives, a host uses a volume.
pub(super) struct Inside {
    world: Rc<World>,
    volume: String,
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Some(gate) = self.world.gates.borrow_mut().get_mut(&self.volume) {
            gate.inside -= 1;
        }
    }
}

impl World {
    pub fn new(model: Model, manager: PoolManager, plan: &Plan, chance: Chance) -> World {
        let events: Arc<Mutex<Vec<PoolEvent>>> = Arc::default();
        let sink = Arc::clone(&events);
        let tell = move |event| sink.lock().map_or((), |mut events| events.push(event));
        let manager = manager.with_events(Arc::new(tell));
        World {
            model: RefCell::new(model),
            doubt: RefCell::new(None),
            manager,
            pool: RefCell::new(None),
            left: Cell::new(plan.operations),
            wrong: RefCell::new(None),
            broken: Cell::new(false),
            finished: Cell::new(false),
            closed: Cell::new(false),
            power: None,
            faulty: plan.faults.reads + plan.faults.writes + plan.faults.flushes > 0,
            snapshots_max: plan.snapshots_max,
            trace: plan.trace,
            rotten: Cell::new(plan.rotten),
            failed: plan.failed,
            repaired: Cell::new(false),
            scrub: Cell::new(plan.scrub),
            scrubbed: Cell::default(),
            events,
            either: RefCell::new(None),
            gates: RefCell::default(),
            seeds: RefCell::new(chance),
        }
    }

    pub fn chance(&self) -> Chance {
        Chance::new(self.seeds.borrow_mut().next())
    }

    /// Says that something is wrong; only the first counts.
    pub fn complain(&self, text: impl Into<String>) {
        self.wrong.borrow_mut().get_or_insert_with(|| text.into());
    }

    /// Something is about to change the tree: the power may fail right in the middle of it.
    pub fn tempt(&self) {
        let Some(disks) = &self.power else { return };
        let mut chance = self.chance();
        if chance.happens(1, 25) {
            disks.cut_after(Some(1 + chance.below(60)));
        }
    }

    /// Says what is done, when that is wanted.
    pub fn say(&self, text: impl FnOnce() -> String) {
        if self.trace {
            println!("{}", text());
        }
    }

    /// Whether this life goes on.
    pub fn goes_on(&self) -> bool {
        self.wrong.borrow().is_none() && !self.broken.get()
    }

    /// One operation less is left. False when there was none.
    pub fn take_turn(&self) -> bool {
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        left > 0 && self.goes_on()
    }

    pub fn pool(&self) -> Option<Arc<Pool>> {
        self.pool.borrow().clone()
    }

    /// Uses a volume, unless it is kept for something else.
    pub fn go_in(self: &Rc<Self>, volume: &str) -> Option<Inside> {
        let mut gates = self.gates.borrow_mut();
        let gate = gates.entry(volume.to_owned()).or_default();
        if gate.shut {
            return None;
        }
        gate.inside += 1;
        Some(Inside { world: Rc::clone(self), volume: volume.to_owned() })
    }

    /// Keeps a volume for oneself: waits for those who use it.
    pub async fn shut(&self, volume: &str) {
        self.gates.borrow_mut().entry(volume.to_owned()).or_default().shut = true;
        while self.gates.borrow().get(volume).is_some_and(|gate| gate.inside > 0) {
            crate::reactor::sleep(std::time::Duration::from_micros(50)).await;
        }
    }

    pub fn open_gate(&self, volume: &str) {
        if let Some(gate) = self.gates.borrow_mut().get_mut(volume) {
            gate.shut = false;
        }
    }

    /// What an error of a host's operation means. True: it was refused for want of space, and all goes on.
    pub fn refused(&self, what: &str, error: &IoError) -> bool {
        match error {
            IoError::CapacityExceeded => true,
            _ if self.faulty => {
                self.broken.set(true);
                false
            }
            _ => {
                self.complain(format!("{what}: {error}"));
                false
            }
        }
    }

    /// As [`refused`](World::refused), for an operation on the tree.
    pub fn refused_by_pool(&self, what: &str, error: &PoolError) -> bool {
        match error.kind {
            PoolErrorKind::NoSpace => true,
            _ if self.faulty => {
                self.broken.set(true);
                false
            }
            _ => {
                self.complain(format!("{what}: {error}"));
                false
            }
        }
    }
}

/// Reads `count` spots of a volume or snapshot, which lie side by side. `None` for a block that cannot be read because it
/// is damaged, which `may_be_lost` must allow.
pub(super) async fn read_run(
    world: &World,
    volume: &Volume,
    (spot, count): (usize, usize),
    may_be_lost: &dyn Fn(usize, u64) -> bool,
) -> Result<Vec<Option<Version>>, IoError> {
    let offset = world.model.borrow().layout.offset(spot);
    let (result, bytes) = volume.read(offset, DmaBuf::uninit(count * BLOCK)).await;
    match result {
        Ok(()) => {
            let parsed = bytes.chunks_exact(BLOCK).enumerate().map(|(at, block)| {
                let expected = offset + (at * BLOCK) as u64;
                match parse(block) {
                    Some((0, 0)) => Some(0),
                    Some((version, place)) if place == expected => Some(version),
                    Some((version, place)) => {
                        world.complain(format!(
                            "{} at byte {expected} holds write {version} for byte {place}",
                            volume.name()
                        ));
                        None
                    }
                    None => {
                        world.complain(format!("{} at byte {expected} is torn", volume.name()));
                        None
                    }
                }
            });
            Ok(parsed.collect())
        }
        Err(IoError::Unrecovered { .. }) if count > 1 => {
            let mut found = Vec::with_capacity(count);
            for at in spot..spot + count {
                found.extend(Box::pin(read_run(world, volume, (at, 1), may_be_lost)).await?);
            }
            Ok(found)
        }
        Err(IoError::Unrecovered { .. }) if may_be_lost(spot, offset) => Ok(vec![None]),
        Err(error) => Err(error),
    }
}
