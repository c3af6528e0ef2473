//! Hosts: tasks that read, write, trim and flush volumes, each several at a time by being several.

#![forbid(unsafe_code)]

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::chance::Chance;
use super::layout::{BLOCK, fill};
use super::model::Moment;
use super::world::{World, read_run};
use crate::memory::DmaBuf;
use crate::pool::Volume;

/// The longest request, in blocks.
const BLOCKS_MAX: u64 = 320;

/// One host, until the operations are used up.
pub(super) async fn host(world: Rc<World>) {
    let mut chance = world.chance();
    loop {
        let pause = match chance.below(400) {
            // Long enough for what the pool does by itself from time to time.
            0 => 1_000_000 + chance.below(3_000_000),
            1..=50 => chance.below(3000),
            _ => 0,
        };
        if pause > 0 {
            crate::reactor::sleep(Duration::from_micros(pause)).await;
        }
        let idle = world.pool().is_none() || world.model.borrow().volumes.is_empty();
        if idle && world.goes_on() && world.left.get() > 0 {
            crate::reactor::sleep(Duration::from_millis(1)).await;
        } else if world.take_turn() {
            one(&world, &mut chance).await;
        } else {
            return;
        }
    }
}

async fn one(world: &Rc<World>, chance: &mut Chance) {
    let name = chance.pick(world.model.borrow().volumes.keys()).cloned();
    let (Some(name), Some(pool)) = (name, world.pool()) else {
        crate::reactor::sleep(Duration::from_micros(200)).await;
        return;
    };
    let Some(_inside) = world.go_in(&name) else {
        crate::reactor::sleep(Duration::from_micros(100)).await;
        return;
    };
    let volume = match pool.open(&name).await {
        Ok(volume) => Arc::new(volume),
        Err(error) => {
            world.refused_by_pool(&format!("opening {name}"), &error);
            return;
        }
    };
    match chance.below(20) {
        0..=10 => write(world, chance, &name, &volume).await,
        11..=15 => read(world, chance, &name, &volume).await,
        16 | 17 => trim(world, chance, &name, &volume).await,
        _ => flush(world, &name, &volume).await,
    }
}

/// A run of spots of a volume that nobody writes to.
fn idle_run(world: &World, chance: &mut Chance, name: &str) -> Option<(usize, usize)> {
    let model = world.model.borrow();
    let volume = model.volumes.get(name)?;
    let spots = model.layout.spots_within(volume.size);
    let long = chance.happens(1, 6);
    let wanted = if long { 1 + chance.below(BLOCKS_MAX) } else { 1 + chance.below(6) } as usize;
    // Some places are written again and again.
    let spot = if chance.happens(1, 2) { chance.below(12) } else { chance.below(spots as u64) } as usize;
    let count = model.layout.run(spot, wanted.min(spots - spot));
    volume.busy.range(spot..spot + count).next().is_none().then_some((spot, count))
}

async fn write(world: &Rc<World>, chance: &mut Chance, name: &str, volume: &Volume) {
    let Some((spot, count)) = idle_run(world, chance, name) else { return };
    let fua = chance.happens(1, 10);
    let (offset, version, submitted, write_cache) = {
        let mut model = world.model.borrow_mut();
        let version = model.next_version();
        let write_cache = model.volumes.get(name).is_none_or(|volume| volume.write_cache);
        (model.layout.offset(spot), version, model.submit(name, spot, count, version), write_cache)
    };
    let mut data = DmaBuf::uninit(count * BLOCK);
    for (at, block) in data.chunks_exact_mut(BLOCK).enumerate() {
        fill(block, version, offset + (at * BLOCK) as u64);
    }
    let written = volume.write(offset, data.freeze(), fua).await;
    if let Err(error) = &written {
        world.refused(&format!("writing {count} blocks at byte {offset} of {name}"), error);
    }
    let durable = fua || !write_cache;
    world.model.borrow_mut().complete(name, (spot, count), submitted, written.is_ok(), durable);
}

async fn trim(world: &Rc<World>, chance: &mut Chance, name: &str, volume: &Volume) {
    let Some((spot, count)) = idle_run(world, chance, name) else { return };
    let zeroes = chance.happens(1, 2);
    let (offset, submitted, write_cache) = {
        let mut model = world.model.borrow_mut();
        let write_cache = model.volumes.get(name).is_none_or(|volume| volume.write_cache);
        (model.layout.offset(spot), model.submit(name, spot, count, 0), write_cache)
    };
    let len = (count * BLOCK) as u64;
    let done = match zeroes {
        true => volume.write_zeroes(offset, len, false).await,
        false => volume.deallocate(offset, len).await,
    };
    if let Err(error) = &done {
        world.refused(&format!("trimming {count} blocks at byte {offset} of {name}"), error);
    }
    world.model.borrow_mut().complete(name, (spot, count), submitted, done.is_ok(), !write_cache);
}

async fn flush(world: &Rc<World>, name: &str, volume: &Volume) {
    let asked: Moment = world.model.borrow_mut().tick();
    match volume.flush().await {
        Ok(()) => world.model.borrow_mut().flushed(name, asked),
        Err(error) => {
            world.refused(&format!("flushing {name}"), &error);
        }
    }
}

async fn read(world: &Rc<World>, chance: &mut Chance, name: &str, volume: &Volume) {
    let (spot, count) = {
        let model = world.model.borrow();
        let Some(state) = model.volumes.get(name) else { return };
        let spots = model.layout.spots_within(state.size);
        let spot = if chance.happens(1, 2) { chance.below(12) } else { chance.below(spots as u64) } as usize;
        let wanted = (1 + chance.below(40)) as usize;
        (spot, model.layout.run(spot, wanted.min(spots - spot)))
    };
    let asked = {
        let mut model = world.model.borrow_mut();
        model.watchers += 1;
        model.tick()
    };
    let may_be_lost = |spot: usize, offset: u64| {
        let model = world.model.borrow();
        let versions = model.readable(name, spot, asked);
        versions.iter().any(|version| model.damaged.contains(&(*version, offset)))
    };
    let read = read_run(world, volume, (spot, count), &may_be_lost).await;
    world.model.borrow_mut().watchers -= 1;
    match read {
        Ok(found) => {
            let model = world.model.borrow();
            for (at, version) in found.into_iter().enumerate() {
                let Some(version) = version else { continue };
                if !model.may_read(name, spot + at, version, asked) {
                    world.complain(format!(
                        "{name}, spot {}: write {version} was read, possible were {:?}",
                        spot + at,
                        model.readable(name, spot + at, asked)
                    ));
                }
            }
        }
        Err(error) => {
            world.refused(&format!("reading {count} blocks at spot {spot} of {name}"), &error);
        }
    }
}
