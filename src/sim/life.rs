//! One life of the pool: from an import to a crash or a clean stop.

#![forbid(unsafe_code)]

use std::rc::Rc;
use std::time::Duration;

use super::care::{self, Scrubbing};
use super::chance::Chance;
use super::check;
use super::hosts::host;
use super::model::Model;
use super::operator::operate;
use super::world::{Doubt, World};
use crate::device::{IoError, SimDisks, SimFaults};
use crate::memory::DmaBuf;
use crate::pool::{Pool, PoolError, PoolManager, PoolOptions, VolumeSpec};
use crate::reactor::SimReactors;

/// A life that goes on for longer stands still.
const LONGEST: Duration = Duration::from_secs(4 * 3600);
/// A volume that only takes up space.
pub(super) const BALLAST: &str = "ballast";
const STEPS_MAX: u64 = 50_000_000;

/// What kind of life it is.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub reactors: u16,
    pub hosts: usize,
    pub operations: u64,
    pub cache_bytes: u64,
    /// Snapshots to keep at most.
    pub snapshots_max: usize,
    /// Create the pool with these options.
    pub create: Option<PoolOptions>,
    /// Fill the new pool until only so many bytes are free.
    pub leave_free: Option<u64>,
    pub faults: SimFaults,
    /// The last life closed the pool in order.
    pub was_closed: bool,
    /// Bits were flipped, now or in an earlier life.
    pub rotten: bool,
    /// Devices have failed, in this life or in an earlier one: writes of which nobody was told may be missing.
    pub failed: bool,
    /// Bits were flipped since the last life: let the pool repair itself.
    pub repair: bool,
    /// How the scrub was left.
    pub scrub: Scrubbing,
    /// At the end delete everything and see that all space came back.
    pub empty: bool,
    /// Close the pool in order at the end.
    pub close: bool,
    /// The power may fail.
    pub may_cut: bool,
    /// Say what is done to the tree.
    pub trace: bool,
}

/// How it went.
pub(super) struct Life {
    pub model: Model,
    pub doubt: Option<Doubt>,
    pub wrong: Option<String>,
    pub closed: bool,
    /// All that can be repaired was.
    pub repaired: bool,
    pub scrub: Scrubbing,
    /// Operations made.
    pub operations: u64,
    /// Simulated time.
    pub time: Duration,
}

/// Lives one life. It ends early when the power is cut or a device fails.
pub(super) fn live(
    disks: &SimDisks,
    model: Model,
    doubt: Option<Doubt>,
    plan: &Plan,
    chance: &mut Chance,
) -> Life {
    let mut reactors = SimReactors::new(plan.reactors + 1, chance.next());
    let mut handles = reactors.handles();
    // The last stands for the control thread, on which the pool has nothing.
    let control = usize::from(plan.reactors);
    handles.truncate(control);
    let manager = PoolManager::new(handles, plan.cache_bytes);
    let mut world = World::new(model, manager, plan, Chance::new(chance.next()));
    world.power = plan.may_cut.then(|| disks.clone());
    let world = Rc::new(world);
    *world.doubt.borrow_mut() = doubt;
    disks.set_faults(plan.faults);
    for at in 0..plan.hosts {
        reactors.spawn(at % control, host(Rc::clone(&world)));
    }
    reactors.spawn(control, manage(Rc::clone(&world), disks.clone(), plan.clone()));
    let mut steps = 0;
    while !disks.is_cut() && !world.finished.get() && world.goes_on() {
        steps += 1;
        let moved = reactors.step(|count| chance.below(count as u64) as usize) || reactors.advance();
        if !moved || reactors.elapsed() > LONGEST || steps > STEPS_MAX {
            let doubt = world.doubt.borrow().clone();
            world.complain(format!(
                "it stands still after {} ms, {steps} steps, with {} operations left, asked for: {doubt:?}",
                reactors.elapsed().as_millis(),
                world.left.get()
            ));
        }
    }
    let time = reactors.elapsed();
    drop(reactors);
    crate::pool::forget_all();
    disks.set_faults(SimFaults::default());
    // Tasks are gone, so this is the last one to hold the world.
    let operations = plan.operations - world.left.get();
    // What could not be decided is as open as before.
    let undecided = world.either.take().map(|(volume, snapshot, asked)| Doubt::Rollback {
        volume,
        snapshot,
        keep: None,
        asked,
    });
    Life {
        model: world.model.borrow().clone(),
        doubt: world.doubt.take().or(undecided),
        wrong: world.wrong.take(),
        closed: world.closed.get(),
        repaired: world.repaired.get(),
        scrub: world.scrub.get(),
        operations,
        time,
    }
}

/// Takes up space with a volume that nobody looks at, so that what is freed must soon be used again.
async fn fill_up(world: &World, pool: &Pool, leave: u64) {
    let size = 1 << 30;
    let spec = VolumeSpec { name: BALLAST.into(), size, block_size: 4096, write_cache: true, uuid: None };
    let filled = async {
        pool.volume_create(spec).await?;
        let ballast = pool.open(BALLAST).await?;
        let mut at = 0;
        while at < size && pool.info().await?.free > leave {
            let mut data = DmaBuf::uninit(1 << 20);
            data.fill(7);
            match ballast.write(at, data.freeze(), false).await {
                Ok(()) => at += 1 << 20,
                Err(IoError::CapacityExceeded) => break,
                Err(error) => return Err(error.into()),
            }
        }
        ballast.flush().await?;
        Ok::<(), PoolError>(())
    };
    if let Err(error) = filled.await {
        world.complain(format!("filling the pool: {error}"));
    }
}

/// Opens the pool, looks at everything, lets the others work, and ends it all.
async fn manage(world: Rc<World>, disks: SimDisks, plan: Plan) {
    let devices = disks.open();
    let opened = match plan.create.clone() {
        Some(options) => world.manager.create("p", devices, options).await,
        None => world.manager.import(devices).await,
    };
    let pool = match opened {
        Ok(pool) => pool,
        Err(error) => {
            world.refused_by_pool("opening the pool", &error);
            return;
        }
    };
    if let Some(leave) = plan.leave_free.filter(|_| plan.create.is_some()) {
        fill_up(&world, &pool, leave).await;
    }
    check::check_all(&world, &pool, !plan.was_closed).await;
    care::judge_scrub_after_import(&world, &pool).await;
    if plan.repair && world.goes_on() {
        care::repair(&world, &pool).await;
    }
    *world.pool.borrow_mut() = Some(pool.clone());
    if plan.operations > 0 && world.goes_on() {
        operate(Rc::clone(&world)).await;
    }
    while world.left.get() > 0 && world.goes_on() {
        crate::reactor::sleep(Duration::from_millis(1)).await;
    }
    let names: Vec<String> = world.model.borrow().volumes.keys().cloned().collect();
    for name in &names {
        world.shut(name).await;
    }
    world.pool.borrow_mut().take();
    if plan.empty && world.goes_on() {
        check::check_emptied(&world, &pool).await;
    }
    drop(pool);
    if plan.close && world.goes_on() {
        match world.manager.export("p").await {
            Ok(()) => world.closed.set(true),
            Err(error) => {
                world.refused_by_pool("closing the pool", &error);
            }
        }
    }
    world.finished.set(true);
}
