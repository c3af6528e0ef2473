//! The operator: one task that grows, prunes and reshapes the tree while hosts work on it.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::care;
use super::chance::Chance;
use super::check;
use super::compare;
use super::world::{Doubt, World};
use crate::pool::{Pool, PoolError, PoolErrorKind, VolumeSpec};

/// Volumes that a run keeps at most.
const VOLUMES_MAX: usize = 4;

/// The operator, until the operations are used up.
pub(super) async fn operate(world: Rc<World>) {
    let mut chance = world.chance();
    let mut serial = 0u32;
    while world.take_turn() {
        // Hosts make most of the operations.
        crate::reactor::sleep(Duration::from_micros(chance.below(8000))).await;
        serial += 1;
        let Some(pool) = world.pool() else { continue };
        one(&world, &pool, &mut chance, serial).await;
    }
}

fn volume(world: &World, chance: &mut Chance) -> Option<String> {
    chance.pick(world.model.borrow().volumes.keys()).cloned()
}

fn snapshot(world: &World, chance: &mut Chance) -> Option<String> {
    chance.pick(world.model.borrow().snapshots.keys()).cloned()
}

/// A name that was never used in this run.
fn fresh(world: &World, letter: char) -> String {
    format!("{letter}{}", world.model.borrow_mut().next_version())
}

async fn one(world: &Rc<World>, pool: &Arc<Pool>, chance: &mut Chance, serial: u32) {
    let (volumes, snapshots) = {
        let model = world.model.borrow();
        (model.volumes.len(), model.snapshots.len())
    };
    let snapshots_max = world.snapshots_max;
    match chance.below(34) {
        _ if volumes == 0 => create(world, pool, chance).await,
        0 | 1 if volumes < VOLUMES_MAX => create(world, pool, chance).await,
        2..=8 if snapshots < snapshots_max => take(world, pool, chance).await,
        9 | 10 if volumes < VOLUMES_MAX => clone(world, pool, chance).await,
        11..=13 if snapshots < snapshots_max => rollback(world, pool, chance).await,
        14 if volumes > 1 => {
            let Some(name) = volume(world, chance) else { return };
            world.shut(&name).await;
            delete(world, pool, &name).await;
        }
        15..=19 => {
            let Some(name) = snapshot(world, chance) else { return };
            delete(world, pool, &name).await;
        }
        20 => rename(world, pool, chance).await,
        21 => resize(world, pool, chance).await,
        22 if serial.is_multiple_of(4) => check::prove(world, pool).await,
        23..=27 => compare::compare(world, pool, chance).await,
        28 | 29 => promote(world, pool, chance).await,
        30 | 31 => pin(world, pool, chance).await,
        32 => care::scrub(world, pool, chance).await,
        _ => look_again(world, pool, chance).await,
    }
}

/// Asks for something, and remembers that its answer is awaited.
async fn ask<T>(
    world: &World,
    doubt: Doubt,
    answer: impl Future<Output = Result<T, PoolError>>,
) -> Option<T> {
    let what = format!("{doubt:?}");
    *world.doubt.borrow_mut() = Some(doubt);
    world.say(|| format!("asked:  {what}"));
    world.tempt();
    let answer = answer.await;
    world.say(|| format!("{}: {what}", if answer.is_ok() { "done" } else { "failed" }));
    match answer {
        Ok(answer) => {
            world.doubt.borrow_mut().take();
            Some(answer)
        }
        Err(error) => {
            // Refused: nothing happened. Otherwise nobody knows until the pool is opened again.
            if world.refused_by_pool(&what, &error) {
                world.doubt.borrow_mut().take();
            }
            None
        }
    }
}

async fn create(world: &World, pool: &Pool, chance: &mut Chance) {
    let name = fresh(world, 'v');
    let size = chance.pick(world.model.borrow().layout.sizes()).unwrap_or(1 << 20);
    let write_cache = chance.happens(2, 3);
    let spec = VolumeSpec { name: name.clone(), size, block_size: 4096, write_cache, uuid: None };
    let doubt = Doubt::Create { name: name.clone(), size, write_cache };
    if ask(world, doubt, pool.volume_create(spec)).await.is_some() {
        world.model.borrow_mut().create(&name, size, write_cache);
    }
}

async fn take(world: &World, pool: &Arc<Pool>, chance: &mut Chance) {
    let mut pairs: Vec<(String, String)> = Vec::new();
    let wanted = if chance.happens(1, 3) { 3 } else { 1 };
    for _ in 0..wanted {
        let Some(name) = volume(world, chance) else { break };
        if pairs.iter().all(|(taken, _)| *taken != name) {
            pairs.push((name, fresh(world, 's')));
        }
    }
    if pairs.is_empty() {
        return;
    }
    let asked = {
        let mut model = world.model.borrow_mut();
        model.watchers += 1;
        model.tick()
    };
    if chance.happens(1, 3) {
        // Shards that have something to commit while the snapshot is taken.
        let (pool, after) = (Arc::clone(pool), Duration::from_micros(chance.below(400)));
        crate::reactor::spawn(async move {
            crate::reactor::sleep(after).await;
            drop(pool.verify().await);
        });
    }
    let doubt = Doubt::Snapshots { pairs: pairs.clone(), asked };
    let taken = ask(world, doubt, pool.snapshot_group(pairs.clone())).await.is_some();
    {
        let mut model = world.model.borrow_mut();
        model.watchers -= 1;
        if taken {
            pairs.iter().for_each(|(volume, name)| model.take(volume, name, asked));
        }
    }
    if taken {
        let names: Vec<String> = pairs.into_iter().map(|(_, name)| name).collect();
        check::look_at_snapshots(world, pool, &names).await;
    }
}

async fn clone(world: &World, pool: &Pool, chance: &mut Chance) {
    let Some(snapshot) = snapshot(world, chance) else { return };
    let name = fresh(world, 'c');
    let doubt = Doubt::Clone { snapshot: snapshot.clone(), name: name.clone() };
    if let Some(info) = ask(world, doubt, pool.clone_create(&snapshot, &name)).await {
        world.model.borrow_mut().clone_of(&snapshot, &name, info.write_cache);
    }
}

async fn rollback(world: &World, pool: &Pool, chance: &mut Chance) {
    let (Some(name), Some(target)) = (volume(world, chance), snapshot(world, chance)) else { return };
    let keep = chance.happens(2, 3).then(|| fresh(world, 'k'));
    world.shut(&name).await;
    let pins = world.model.borrow().family.of(&name).pins;
    if keep.is_none() && !pins.is_empty() {
        must_name_pins(world, &name, &pins, pool.rollback(&name, &target, None).await);
        world.open_gate(&name);
        return;
    }
    let asked = world.model.borrow_mut().tick();
    let doubt = Doubt::Rollback { volume: name.clone(), snapshot: target.clone(), keep: keep.clone(), asked };
    if ask(world, doubt, pool.rollback(&name, &target, keep.clone())).await.is_some() {
        rolled_back(world, &name, &target, keep.as_deref(), asked);
        if let Some(keep) = keep {
            check::look_at_snapshots(world, pool, &[keep]).await;
        }
    }
    world.open_gate(&name);
}

/// What a rollback makes true.
pub(super) fn rolled_back(world: &World, name: &str, target: &str, keep: Option<&str>, asked: u64) {
    let mut model = world.model.borrow_mut();
    if let Some(keep) = keep {
        model.take(name, keep, asked);
    }
    let write_cache = model.volumes.get(name).is_none_or(|volume| volume.write_cache);
    model.clone_of(target, name, write_cache);
}

/// What would lose a pinned node is refused, and the refusal says who pinned it.
fn must_name_pins<T>(world: &World, name: &str, pins: &BTreeSet<String>, answer: Result<T, PoolError>) {
    let refusal = answer.err();
    let fits = |error: &PoolError| {
        error.kind == PoolErrorKind::Busy && pins.iter().all(|by| error.text.contains(by))
    };
    if !refusal.as_ref().is_some_and(fits) {
        world.complain(format!("{name} is pinned by {pins:?}, but to lose it is answered with {refusal:?}"));
    }
}

async fn delete(world: &World, pool: &Pool, name: &str) {
    let pins = world.model.borrow().family.of(name).pins;
    if !pins.is_empty() {
        must_name_pins(world, name, &pins, pool.delete(name).await);
        world.open_gate(name);
        return;
    }
    let doubt = Doubt::Delete { name: name.to_owned() };
    if ask(world, doubt, pool.delete(name)).await.is_some() {
        deleted(world, name);
    }
    world.open_gate(name);
}

pub(super) fn deleted(world: &World, name: &str) {
    let mut model = world.model.borrow_mut();
    model.volumes.remove(name);
    model.snapshots.remove(name);
    model.family.gone(name);
}

/// Makes a clone the main line. Bytes, names and parents stay as they are.
async fn promote(world: &World, pool: &Pool, chance: &mut Chance) {
    let Some(name) = volume(world, chance) else { return };
    let before = match pool.nodes().await {
        Ok(nodes) => nodes,
        Err(error) => {
            world.refused_by_pool("listing", &error);
            return;
        }
    };
    let promoted = async {
        match pool.promote(&name).await {
            // A volume that was made from none.
            Err(error) if error.kind == PoolErrorKind::Invalid => Ok(false),
            answer => answer.map(|_| true),
        }
    };
    if ask(world, Doubt::Promote, promoted).await != Some(true) {
        return;
    }
    match pool.nodes().await {
        Ok(after) => {
            let owner = |nodes: &[crate::pool::NodeInfo], snapshot: &str| {
                nodes.iter().find(|node| node.name == snapshot).and_then(|node| node.volume.clone())
            };
            let changed = after.iter().filter(|node| node.volume != owner(&before, &node.name));
            for node in changed.filter(|node| node.volume.as_deref() != Some(&name)) {
                world.complain(format!("promoting {name} gave {} to {:?}", node.name, node.volume));
            }
        }
        Err(error) => {
            world.refused_by_pool("listing", &error);
        }
    }
}

async fn pin(world: &World, pool: &Pool, chance: &mut Chance) {
    let snapshots = chance.happens(3, 4);
    let name = if snapshots { snapshot(world, chance) } else { volume(world, chance) };
    let Some(name) = name else { return };
    // Those that are pinned are not deleted, so fewer are pinned than unpinned.
    let pinned = chance.happens(2, 5);
    let by = ["ann", "ben"][chance.below(2) as usize].to_owned();
    let doubt = Doubt::Pin { name: name.clone(), by: by.clone(), pinned };
    let done = match pinned {
        true => ask(world, doubt, pool.pin(&name, &by, None)).await,
        false => ask(world, doubt, pool.unpin(&name, &by)).await,
    };
    if done.is_some() {
        world.model.borrow_mut().family.pin(&name, &by, pinned);
    }
}

async fn rename(world: &World, pool: &Pool, chance: &mut Chance) {
    let snapshots = chance.happens(1, 2);
    let name = if snapshots { snapshot(world, chance) } else { volume(world, chance) };
    let Some(name) = name else { return };
    let new = fresh(world, 'r');
    world.shut(&name).await;
    let doubt = Doubt::Rename { name: name.clone(), new: new.clone() };
    if ask(world, doubt, pool.rename(&name, &new)).await.is_some() {
        renamed(world, &name, &new);
    }
    world.open_gate(&name);
}

pub(super) fn renamed(world: &World, name: &str, new: &str) {
    let mut model = world.model.borrow_mut();
    if let Some(volume) = model.volumes.remove(name) {
        model.volumes.insert(new.to_owned(), volume);
    }
    if let Some(snapshot) = model.snapshots.remove(name) {
        model.snapshots.insert(new.to_owned(), snapshot);
    }
    model.family.renamed(name, new);
}

async fn resize(world: &World, pool: &Pool, chance: &mut Chance) {
    let Some(name) = volume(world, chance) else { return };
    let size = chance.pick(world.model.borrow().layout.sizes()).unwrap_or(1 << 20);
    world.shut(&name).await;
    let (old, pins) = {
        let model = world.model.borrow();
        (model.volumes.get(&name).map_or(0, |volume| volume.size), model.family.of(&name).pins)
    };
    if size < old && !pins.is_empty() {
        must_name_pins(world, &name, &pins, pool.resize(&name, size, true).await);
        world.open_gate(&name);
        return;
    }
    let doubt = Doubt::Resize { name: name.clone(), size };
    if ask(world, doubt, pool.resize(&name, size, true)).await.is_some() {
        world.model.borrow_mut().resize(&name, size);
    }
    world.open_gate(&name);
}

/// Reads a whole snapshot once more.
async fn look_again(world: &World, pool: &Pool, chance: &mut Chance) {
    if let Some(name) = snapshot(world, chance) {
        check::look_at_snapshots(world, pool, &[name]).await;
    }
}
