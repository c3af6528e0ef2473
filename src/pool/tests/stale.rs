//! What was deleted is never seen again: blocks that held one volume's data are handed to others, and whatever those did
//! not write reads as zeroes, also after a power cut in the middle of a write.
#![forbid(unsafe_code)]

use super::*;
use crate::device::{SimDisks, SimSpec};
use crate::pool::{Severity, Volume};
use crate::reactor::SimReactors;

/// The deleted volume's data.
const OLD: u8 = 0xA5;
const MIB: u64 = 1 << 20;
/// Bytes of the volumes that come after it.
const SIZE: u64 = 4 * MIB;

/// Fills the whole pool with [`OLD`], and deletes it.
async fn soil(pool: &Pool) {
    pool.volume_create(spec("old", 1024)).await.unwrap();
    let old = pool.open("old").await.unwrap();
    let mut data = DmaBuf::uninit(256 << 10);
    data.fill(OLD);
    let data = data.freeze();
    let mut at = 0;
    while old.write(at, data.clone(), false).await.is_ok() {
        at += 256 << 10;
    }
    assert!(at > 30 * MIB, "only {at} bytes went in");
    old.flush().await.unwrap();
    drop(old);
    pool.delete("old").await.unwrap();
    while pool.info().await.unwrap().deleting > 0 {
        crate::reactor::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// A write of some sectors, seldom of whole blocks.
fn piece(random: &mut Random) -> (u64, usize) {
    let at = random.next(SIZE / 512);
    (at * 512, (1 + random.next(20)).min(SIZE / 512 - at) as usize * 512)
}

async fn write_at(volume: &Volume, at: u64, bytes: &[u8]) {
    volume.write(at, DmaBuf::copy_of(bytes).freeze(), false).await.unwrap();
}

#[test]
fn what_a_new_volume_did_not_write_is_zero_although_its_blocks_were_full() {
    for seed in super::seeds() {
        println!("SEED={seed}");
        run(async move {
            let mut random = Random(seed | 1);
            let devices = [ram(64)];
            let (manager, pool) = pool_on(&devices).await;
            soil(&pool).await;
            let image = devices[0].image().unwrap();
            let soiled = image.chunks(4096).filter(|block| block.iter().all(|byte| *byte == OLD)).count();
            assert!(soiled > 7000, "only {soiled} blocks still hold the deleted data");
            pool.volume_create(spec("v", SIZE >> 20)).await.unwrap();
            assert!(read(&pool, "v", 0, SIZE as usize).await.iter().all(|byte| *byte == 0));
            // Parts of blocks in the volume, in a clone of it, and trims that leave parts of blocks.
            let mut held = vec![("v", vec![0; SIZE as usize])];
            for (turn, name) in ["v", "c"].into_iter().enumerate() {
                if turn == 1 {
                    pool.snapshot_create("v", "s").await.unwrap();
                    pool.clone_create("s", "c").await.unwrap();
                    held.push(("c", held[0].1.clone()));
                }
                let volume = pool.open(name).await.unwrap();
                for serial in 0..300 {
                    let (at, len) = piece(&mut random);
                    let place = at as usize..at as usize + len;
                    if serial % 5 == 0 {
                        volume.write_zeroes(at, len as u64, false).await.unwrap();
                        held[turn].1[place].fill(0);
                    } else {
                        let bytes = pattern(serial * 2 + turn as u64, at, len);
                        write_at(&volume, at, &bytes).await;
                        held[turn].1[place].copy_from_slice(&bytes);
                    }
                }
                volume.flush().await.unwrap();
            }
            held.push(("s", held[0].1.clone()));
            // What a shrunk volume lost does not come back when it grows.
            pool.resize("c", MIB, true).await.unwrap();
            pool.resize("c", SIZE, false).await.unwrap();
            held[1].1[MIB as usize..].fill(0);
            for (name, bytes) in &held {
                assert!(read(&pool, name, 0, SIZE as usize).await == *bytes, "{name}");
            }
            let crashed = copy_of(&devices);
            manager.shut(&pool).await.unwrap();
            let after = super::manager();
            let pool = after.import(crashed).await.unwrap();
            for (name, bytes) in &held {
                assert!(read(&pool, name, 0, SIZE as usize).await == *bytes, "{name} after a crash");
            }
            assert_sound(&pool).await;
        });
    }
}

/// Runs `task` on simulated disks until it ends or the power does.
fn simulate(seed: u64, disks: &SimDisks, task: impl Future<Output = ()> + 'static) {
    let mut reactors = SimReactors::new(1, seed);
    let ended = Rc::new(std::cell::Cell::new(false));
    let end = Rc::clone(&ended);
    reactors.spawn(0, async move {
        task.await;
        end.set(true);
    });
    let mut random = Random(seed | 1);
    while !ended.get() && !disks.is_cut() {
        let moved = reactors.step(|count| random.next(count as u64) as usize) || reactors.advance();
        assert!(moved, "it stands still");
    }
    drop(reactors);
    crate::pool::forget_all();
}

#[test]
fn a_power_cut_in_the_middle_of_copying_on_write_shows_nothing_of_what_was_deleted() {
    for seed in super::seeds() {
        println!("SEED={seed}");
        let disk = SimSpec { size: 64 << 20, write_cache: true, latency: true, slow_reads: false };
        let disks = SimDisks::new(seed, vec![disk]);
        let opened = disks.open();
        simulate(seed, &disks, async move {
            let (manager, pool) = pool_on(&opened).await;
            soil(&pool).await;
            pool.volume_create(spec("v", SIZE >> 20)).await.unwrap();
            // Every second block is there for the clone to copy.
            let volume = pool.open("v").await.unwrap();
            for block in (0..SIZE / 4096).step_by(2) {
                write_at(&volume, block * 4096, &[1; 4096]).await;
            }
            drop(volume);
            pool.snapshot_create("v", "s").await.unwrap();
            pool.clone_create("s", "c").await.unwrap();
            manager.export("p").await.unwrap();
        });
        let mut random = Random(seed | 1);
        for round in 0..12 {
            let opened = disks.open();
            disks.cut_after(Some(40 + random.next(400)));
            simulate(seed ^ round, &disks, async move {
                let pool = manager().import(opened).await.unwrap();
                let clone = pool.open("c").await.unwrap();
                let mut random = Random(seed ^ round << 32 | 1);
                // Several at once, each of a part of a block or more: all bytes 2.
                loop {
                    let writes = (0..8).map(|_| {
                        let (at, len) = piece(&mut random);
                        clone.write(at, DmaBuf::copy_of(&vec![2; len]).freeze(), false)
                    });
                    drop(crate::pool::join::all(writes).await);
                }
            });
            disks.power_cycle();
            let opened = disks.open();
            simulate(seed ^ round, &disks, async move {
                let manager = manager();
                let pool = manager.import(opened).await.unwrap();
                for (name, own) in [("v", &[][..]), ("s", &[]), ("c", &[2])] {
                    let bytes = read(&pool, name, 0, SIZE as usize).await;
                    for (block, bytes) in bytes.chunks(4096).enumerate() {
                        let below = u8::from(block % 2 == 0);
                        let wrong = bytes.iter().position(|byte| *byte != below && !own.contains(byte));
                        assert!(
                            wrong.is_none(),
                            "round {round}: {name}, block {block} at {wrong:?}: {:02x}",
                            bytes[wrong.unwrap_or(0)]
                        );
                    }
                }
                // What a crash leaves in one of two copies is no damage.
                let report = pool.check(CheckOptions::default()).await.unwrap();
                let worse = report.findings.iter().find(|finding| finding.severity > Severity::Note);
                assert!(worse.is_none(), "{worse:#?}");
                manager.export("p").await.unwrap();
            });
        }
    }
}
