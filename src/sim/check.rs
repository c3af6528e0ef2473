//! Looking at everything: each snapshot, each volume, the list of names, the counts, and the pool's own proof.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::time::Duration;

use super::layout::{BLOCK, Version};
use super::life::BALLAST;
use super::operator::{deleted, renamed, rolled_back};
use super::world::{Doubt, World, read_run};
use crate::pool::{NodeInfo, NodeKind, Pool};

/// Blocks read at a time.
const RUN: usize = 256;

/// Reads all of a volume or snapshot. `None` after an error, which was dealt with.
async fn read_all(
    world: &World,
    pool: &Pool,
    name: &str,
    size: u64,
    possible: &dyn Fn(usize) -> Vec<Version>,
) -> Option<Vec<Option<Version>>> {
    let volume = match pool.open(name).await {
        Ok(volume) => volume,
        Err(error) => {
            world.refused_by_pool(&format!("opening {name}"), &error);
            return None;
        }
    };
    let spots = world.model.borrow().layout.spots_within(size);
    let may_be_lost = |spot: usize, offset: u64| {
        let model = world.model.borrow();
        possible(spot).iter().any(|version| model.damaged.contains(&(*version, offset)))
    };
    let mut found = Vec::with_capacity(spots);
    while found.len() < spots {
        let count = world.model.borrow().layout.run(found.len(), RUN.min(spots - found.len()));
        match read_run(world, &volume, (found.len(), count), &may_be_lost).await {
            Ok(run) => found.extend(run),
            Err(error) => {
                world.refused(&format!("reading spot {} of {name}", found.len()), &error);
                return None;
            }
        }
    }
    Some(found)
}

/// Reads snapshots that were taken as one, or are known: they must be what they have to be.
pub(super) async fn look_at_snapshots(world: &World, pool: &Pool, names: &[String]) {
    let mut all = Vec::new();
    for name in names {
        let (size, known) = {
            let model = world.model.borrow();
            let Some(snapshot) = model.snapshots.get(name) else { continue };
            (snapshot.size, model.known(name).map(<[Version]>::to_vec))
        };
        let possible = |spot: usize| match &known {
            Some(known) => vec![known[spot]],
            None => world.model.borrow().possible(name, spot),
        };
        let Some(found) = read_all(world, pool, name, size, &possible).await else { return };
        if let Some(known) = &known {
            let differs = |(found, known): (&Option<Version>, &Version)| found.is_some_and(|f| f != *known);
            if let Some(spot) = found.iter().zip(known).position(differs) {
                world.complain(format!(
                    "snapshot {name} has changed: spot {spot} held write {} and now {:?}",
                    known[spot], found[spot]
                ));
            }
        }
        all.push((name.clone(), found));
    }
    let judged = world.model.borrow_mut().judge_group(&all);
    if let Err(text) = judged {
        world.complain(text);
    }
}

/// Lets the pool prove itself. Damage that was done on purpose does not count.
pub(super) async fn prove(world: &World, pool: &Pool) {
    let rotten = world.rotten.get();
    let mut wrong = None;
    for _ in 0..50 {
        match pool.verify().await {
            Ok(found) => wrong = found.into_iter().find(|text| !(rotten && text.contains("is damaged"))),
            Err(error) => {
                world.refused_by_pool("proving the pool", &error);
                return;
            }
        }
        if wrong.is_none() {
            return;
        }
        // The proof looks at a pool that goes on with what it does by itself.
        crate::reactor::sleep(Duration::from_millis(40)).await;
    }
    wrong.into_iter().for_each(|text| world.complain(format!("the pool does not prove sound: {text}")));
}

/// Decides what became of the operation that nobody saw answered.
fn resolve(world: &World, listed: &[NodeInfo]) {
    let Some(doubt) = world.doubt.borrow_mut().take() else { return };
    let there = |name: &str| listed.iter().any(|node| node.name == name);
    match doubt {
        Doubt::Create { name, size, write_cache } if there(&name) => {
            world.model.borrow_mut().create(&name, size, write_cache);
        }
        Doubt::Snapshots { pairs, asked } => {
            let mut model = world.model.borrow_mut();
            if pairs.iter().any(|(_, name)| there(name)) {
                pairs.iter().for_each(|(volume, name)| model.take(volume, name, asked));
            }
        }
        Doubt::Clone { snapshot, name } => {
            if let Some(info) = listed.iter().find(|node| node.name == name) {
                world.model.borrow_mut().clone_of(&snapshot, &name, info.write_cache);
            }
        }
        Doubt::Rollback { volume, snapshot, keep: Some(keep), asked } if there(&keep) => {
            rolled_back(world, &volume, &snapshot, Some(&keep), asked);
        }
        Doubt::Rollback { volume, snapshot, keep: None, asked } if grew_from(world, listed, &volume) => {
            rolled_back(world, &volume, &snapshot, None, asked);
        }
        Doubt::Rollback { volume, snapshot, keep: None, asked } => {
            let size = |name: &str| listed.iter().find(|node| node.name == name).map(|node| node.size);
            let before = world.model.borrow().volumes.get(&volume).map(|volume| volume.size);
            match (size(&volume) == before, size(&volume) == size(&snapshot)) {
                // Both are possible; what is found decides.
                (true, true) => *world.either.borrow_mut() = Some((volume, snapshot, asked)),
                (false, _) => rolled_back(world, &volume, &snapshot, None, asked),
                (true, false) => {}
            }
        }
        Doubt::Delete { name } if !there(&name) => deleted(world, &name),
        Doubt::Rename { name, new } if there(&new) => renamed(world, &name, &new),
        Doubt::Resize { name, size } if listed.iter().any(|node| node.name == name && node.size == size) => {
            world.model.borrow_mut().resize(&name, size);
        }
        Doubt::Pin { name, by, pinned } => {
            let is = |node: &&NodeInfo| node.name == name && node.pins.iter().any(|pin| pin.by == by);
            if listed.iter().any(|node| is(&node)) == pinned {
                world.model.borrow_mut().family.pin(&name, &by, pinned);
            }
        }
        _ => {}
    }
}

/// Whether a volume has another parent than it is known to have had.
fn grew_from(world: &World, listed: &[NodeInfo], volume: &str) -> bool {
    let known = world.model.borrow().family.of(volume).parent;
    listed.iter().any(|node| node.name == volume && node.parent != known)
}

/// Parents and pins must be what they are known to be.
fn check_family(world: &World, listed: &[NodeInfo]) {
    for node in listed {
        let kin = world.model.borrow().family.of(&node.name);
        let pins: BTreeSet<String> = node.pins.iter().map(|pin| pin.by.clone()).collect();
        if node.parent != kin.parent || pins != kin.pins {
            world.complain(format!(
                "{} has parent {:?} and pins {pins:?}; known is {kin:?}",
                node.name, node.parent
            ));
        }
    }
}

/// After an import: everything is there and as it must be. `crashed` says that the pool was not closed in order.
pub(super) async fn check_all(world: &World, pool: &Pool, crashed: bool) {
    let mut listed = match pool.nodes().await {
        Ok(listed) => listed,
        Err(error) => {
            world.refused_by_pool("listing", &error);
            return;
        }
    };
    listed.retain(|node| node.name != BALLAST);
    world.model.borrow_mut().watchers = 0;
    resolve(world, &listed);
    let found: BTreeSet<(String, bool)> =
        listed.iter().map(|node| (node.name.clone(), node.kind == NodeKind::Volume)).collect();
    let expected: BTreeSet<(String, bool)> = {
        let model = world.model.borrow();
        let volumes = model.volumes.keys().map(|name| (name.clone(), true));
        volumes.chain(model.snapshots.keys().map(|name| (name.clone(), false))).collect()
    };
    if found != expected {
        let missing: Vec<_> = expected.difference(&found).collect();
        let extra: Vec<_> = found.difference(&expected).collect();
        world.complain(format!("missing are {missing:?}; nobody made {extra:?}"));
        return;
    }
    check_family(world, &listed);
    let volumes: Vec<(String, u64)> =
        world.model.borrow().volumes.iter().map(|(name, volume)| (name.clone(), volume.size)).collect();
    for (name, size) in volumes {
        if !listed.iter().any(|node| node.name == name && node.size == size) {
            world.complain(format!("volume {name} has not {size} bytes"));
        }
        let either = world.either.borrow().clone().filter(|(volume, ..)| *volume == name);
        let target = either.and_then(|(_, target, _)| world.model.borrow().known(&target).map(<[_]>::to_vec));
        let possible = |spot: usize| {
            let mut versions = world.model.borrow().after_crash(&name, spot);
            versions.extend(target.as_ref().and_then(|target| target.get(spot)));
            versions
        };
        let Some(found) = read_all(world, pool, &name, size, &possible).await else { return };
        let judged = world.model.borrow_mut().judge_crashed(&name, &found);
        let is_target = target.is_some_and(|target| {
            found.len() == target.len()
                && found.iter().zip(target).all(|(found, target)| found.is_none_or(|found| found == target))
        });
        match judged {
            Err(_) if is_target => world.model.borrow_mut().set(&name, &found),
            Err(text) if crashed => world.complain(text),
            Err(text) => world.complain(format!("after a clean stop: {text}")),
            Ok(()) => {}
        }
    }
    world.either.take();
    let snapshots: Vec<String> = world.model.borrow().snapshots.keys().cloned().collect();
    let unknown = world.model.borrow().unknown();
    look_at_snapshots(world, pool, &unknown).await;
    for name in snapshots.iter().filter(|name| !unknown.contains(name)) {
        look_at_snapshots(world, pool, std::slice::from_ref(name)).await;
    }
    prove(world, pool).await;
    check_counts(world, pool).await;
}

/// Each node names as many blocks as the model says, once what a crash interrupted has been ended.
async fn check_counts(world: &World, pool: &Pool) {
    let mut differs = None;
    for _ in 0..100 {
        let listed = match pool.nodes().await {
            Ok(listed) => listed,
            Err(error) => {
                world.refused_by_pool("listing", &error);
                return;
            }
        };
        differs = listed.iter().find_map(|node| {
            let blocks = world.model.borrow().referenced(&node.name)?;
            let expected = (blocks * BLOCK) as u64;
            (expected != node.referenced).then(|| {
                format!("{} refers to {expected} bytes, but {} are listed", node.name, node.referenced)
            })
        });
        if differs.is_none() {
            return;
        }
        crate::reactor::sleep(Duration::from_millis(20)).await;
    }
    differs.into_iter().for_each(|text| world.complain(text));
}

/// Deletes everything: all space must come back.
pub(super) async fn check_emptied(world: &World, pool: &Pool) {
    let names: Vec<String> = {
        let model = world.model.borrow();
        model.volumes.keys().chain(model.snapshots.keys()).cloned().collect()
    };
    let pinned = world.model.borrow().family.pinned();
    for (name, by) in pinned {
        if let Err(error) = pool.unpin(&name, &by).await {
            world.refused_by_pool(&format!("unpinning {name}"), &error);
            return;
        }
    }
    let ballast = pool.find(BALLAST).await.is_ok().then(|| BALLAST.to_owned());
    for name in names.into_iter().chain(ballast) {
        match pool.delete(&name).await {
            Ok(()) => deleted(world, &name),
            Err(error) => {
                world.refused_by_pool(&format!("deleting {name}"), &error);
                return;
            }
        }
    }
    for _ in 0..10_000 {
        crate::reactor::sleep(Duration::from_millis(10)).await;
        match pool.info().await {
            Ok(info) if info.deleting == 0 => {
                if info.allocated != 0 {
                    world.complain(format!("{} bytes are allocated in an empty pool", info.allocated));
                }
                return;
            }
            Ok(_) => {}
            Err(error) => {
                world.refused_by_pool("asking for the pool's state", &error);
                return;
            }
        }
    }
    world.complain("deleting does not end");
}
