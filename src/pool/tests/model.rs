//! A random walk over all operations, against a model that keeps every byte; with crashes.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use super::*;

const VOLUME_MIB: u64 = 6;

/// What every volume and snapshot must hold.
#[derive(Default)]
struct Model {
    volumes: BTreeMap<String, Vec<u8>>,
    snapshots: BTreeMap<String, Vec<u8>>,
}

impl Model {
    fn pick(&self, random: &mut Random, snapshots: bool) -> Option<String> {
        let map = if snapshots { &self.snapshots } else { &self.volumes };
        map.keys().nth(random.next(map.len() as u64) as usize).cloned()
    }

    async fn check(&self, pool: &Pool) {
        for (name, bytes) in self.volumes.iter().chain(&self.snapshots) {
            let found = read(pool, name, 0, bytes.len()).await;
            if let Some(at) = found.iter().zip(bytes).position(|(found, expected)| found != expected) {
                panic!("{name} differs at byte {at}");
            }
        }
        let listed: Vec<String> = pool.nodes().await.unwrap().into_iter().map(|node| node.name).collect();
        assert_eq!(listed.len(), self.volumes.len() + self.snapshots.len(), "{listed:?}");
        assert_sound(pool).await;
    }
}

async fn step(pool: &Pool, model: &mut Model, random: &mut Random, serial: &mut u64) {
    *serial += 1;
    let volume = model.pick(random, false);
    match (random.next(20), volume) {
        (0, _) | (_, None) if model.volumes.len() < 4 => {
            let name = format!("v{serial}");
            pool.volume_create(spec(&name, VOLUME_MIB)).await.unwrap();
            model.volumes.insert(name, vec![0; (VOLUME_MIB << 20) as usize]);
        }
        (1..=9, Some(name)) => {
            let sectors = (VOLUME_MIB << 20) / 512;
            let whole = random.next(3) > 0;
            let unit = if whole { 8 } else { 1 };
            let at = random.next(sectors / unit) * unit;
            let count = (random.next(600) / unit * unit).clamp(unit, sectors - at);
            let (offset, len) = (at * 512, (count * 512) as usize);
            let bytes = pattern(*serial, offset, len);
            write(pool, &name, offset, &bytes).await;
            model.volumes.get_mut(&name).unwrap()[offset as usize..][..len].copy_from_slice(&bytes);
        }
        (10, Some(name)) => {
            let at = random.next(VOLUME_MIB << 8) << 12;
            let len = (random.next(700) << 12).min((VOLUME_MIB << 20) - at);
            pool.open(&name).await.unwrap().deallocate(at, len).await.unwrap();
            model.volumes.get_mut(&name).unwrap()[at as usize..][..len as usize].fill(0);
        }
        (11, Some(name)) => {
            let at = random.next(VOLUME_MIB << 11) << 9;
            let len = (random.next(5000) << 9).min((VOLUME_MIB << 20) - at);
            pool.open(&name).await.unwrap().write_zeroes(at, len, false).await.unwrap();
            model.volumes.get_mut(&name).unwrap()[at as usize..][..len as usize].fill(0);
        }
        (12 | 13, Some(name)) if model.snapshots.len() < 10 => {
            let snapshot = format!("{name}@{serial}");
            pool.snapshot_create(&name, &snapshot).await.unwrap();
            model.snapshots.insert(snapshot, model.volumes[&name].clone());
        }
        (14, Some(name)) => {
            let Some(snapshot) = model.pick(random, true) else { return };
            let keep =
                (random.next(2) == 0 && model.snapshots.len() < 10).then(|| format!("{name}@kept{serial}"));
            pool.rollback(&name, &snapshot, keep.clone()).await.unwrap();
            let before = model.volumes.insert(name, model.snapshots[&snapshot].clone()).unwrap();
            if let Some(keep) = keep {
                model.snapshots.insert(keep, before);
            }
        }
        (15, _) if model.volumes.len() < 4 => {
            let Some(snapshot) = model.pick(random, true) else { return };
            let name = format!("c{serial}");
            pool.clone_create(&snapshot, &name).await.unwrap();
            model.volumes.insert(name, model.snapshots[&snapshot].clone());
        }
        (16, Some(name)) if random.next(3) == 0 => {
            pool.delete(&name).await.unwrap();
            model.volumes.remove(&name);
        }
        (17 | 18, _) => {
            let Some(snapshot) = model.pick(random, true) else { return };
            pool.delete(&snapshot).await.unwrap();
            model.snapshots.remove(&snapshot);
        }
        (19, Some(name)) => pool.open(&name).await.unwrap().flush().await.unwrap(),
        _ => {}
    }
}

async fn walk(seed: u64, steps: u32) {
    let mut random = Random(seed | 1);
    let (mut serial, mut model) = (0, Model::default());
    let count = 1 + random.next(2) as usize;
    let mut devices: Vec<Device> = (0..count).map(|_| ram(96)).collect();
    let mut manager = Rc::new(manager());
    let options = PoolOptions { shards: Some(1 + random.next(5) as u16), ..PoolOptions::default() };
    let mut pool = manager.create("p", devices.clone(), options).await.unwrap();
    for at in 0..steps {
        step(&pool, &mut model, &mut random, &mut serial).await;
        if random.next(4) == 0 {
            crate::reactor::yield_now().await;
        }
        match random.next(60) {
            0 => {
                // A crash after everything was flushed: all of it must be there.
                for name in model.volumes.keys().take(1) {
                    pool.open(name).await.unwrap().flush().await.unwrap();
                }
                let crashed = copy_of(&devices);
                manager.shut(&pool).await.unwrap();
                devices = crashed;
                manager = Rc::new(super::manager());
                pool = manager
                    .import(devices.clone())
                    .await
                    .unwrap_or_else(|error| panic!("step {at}: {error}"));
                model.check(&pool).await;
            }
            1 => {
                drop(pool);
                manager.export("p").await.unwrap();
                pool = manager.import(devices.clone()).await.unwrap();
                model.check(&pool).await;
            }
            _ => {}
        }
    }
    model.check(&pool).await;
    for name in model.volumes.keys().chain(model.snapshots.keys()) {
        pool.delete(name).await.unwrap();
    }
    deleted(&pool).await;
    assert_sound(&pool).await;
    let info = pool.info().await.unwrap();
    assert_eq!((info.allocated, info.volumes, info.snapshots), (0, 0, 0));
    assert!(info.damage.is_empty(), "{:?}", info.damage);
}

#[test]
fn random_operations_agree_with_a_model_through_crashes() {
    for seed in seeds() {
        println!("SEED={seed}");
        run(walk(seed, 300));
    }
}
