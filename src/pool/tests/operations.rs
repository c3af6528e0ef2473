//! Each operation once, with its effects and its refusals.
#![forbid(unsafe_code)]

use super::*;
use crate::device::IoError;
use crate::pool::{PoolErrorKind, VolumeSpec};

#[test]
fn what_is_written_is_read_at_any_offset_and_length() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(128)]).await;
        pool.volume_create(spec("v", 40)).await.unwrap();
        for (seed, offset, len) in [
            (1, 0, 4096),
            (2, 1 << 20, 3 << 20),
            (3, 4096 * 255, 8192),
            (4, 512, 512),
            (5, 1536, 9 * 512),
            (6, 40 << 20, 0),
        ] {
            write(&pool, "v", offset, &pattern(seed, offset, len)).await;
            assert_eq!(read(&pool, "v", offset, len).await, pattern(seed, offset, len), "{offset} {len}");
        }
        // Parts of blocks leave their neighbours alone.
        assert_eq!(read(&pool, "v", 0, 512).await, pattern(1, 0, 512));
        assert_eq!(read(&pool, "v", 3 * 512 + 9 * 512, 512).await, vec![0; 512]);
        let v = pool.open("v").await.unwrap();
        for (offset, len) in [(40 << 20, 4096), ((40 << 20) - 4096, 8192), (u64::MAX - 511, 512), (100, 512)]
        {
            let (result, _) = v.read(offset, DmaBuf::uninit(len)).await;
            assert_eq!(result, Err(IoError::OutOfRange), "{offset} {len}");
        }
        assert_sound(&pool).await;
    });
}

#[test]
fn snapshots_keep_and_rollback_brings_back() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(128)]).await;
        pool.volume_create(spec("v", 8)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 2 << 20)).await;
        pool.snapshot_create("v", "v@1").await.unwrap();
        write(&pool, "v", 1 << 20, &pattern(2, 0, 2 << 20)).await;
        let before = read(&pool, "v", 0, 8 << 20).await;
        pool.snapshot_create("v", "v@2").await.unwrap();
        pool.open("v").await.unwrap().write_zeroes(0, 8 << 20, false).await.unwrap();
        assert_eq!(read(&pool, "v", 0, 8 << 20).await, vec![0; 8 << 20]);
        assert_eq!(read(&pool, "v@2", 0, 8 << 20).await, before);
        pool.rollback("v", "v@1", Some("v@bad".into())).await.unwrap();
        assert_eq!(read(&pool, "v", 0, 2 << 20).await, pattern(1, 0, 2 << 20));
        assert_eq!(read(&pool, "v", 2 << 20, 1 << 20).await, vec![0; 1 << 20]);
        // Newer snapshots stay, and one can go forward again.
        pool.rollback("v", "v@2", None).await.unwrap();
        assert_eq!(read(&pool, "v", 0, 8 << 20).await, before);
        assert_eq!(read(&pool, "v@bad", 0, 8 << 20).await, vec![0; 8 << 20]);
        deleted(&pool).await;
        assert_sound(&pool).await;
        let error = pool.open("v@1").await.unwrap().write(0, DmaBuf::zeroed(4096).freeze(), false).await;
        assert_eq!(error, Err(IoError::WriteProtected));
        let node = pool.node("v@1").await.unwrap();
        assert_eq!((node.referenced, node.written), (2 << 20, 2 << 20));
        assert_eq!(node.children, ["v@2"].map(String::from));
        assert_eq!(pool.node("v@bad").await.unwrap().parent.as_deref(), Some("v@2"));
    });
}

#[test]
fn deleting_gives_back_exactly_what_nobody_else_names() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(128)]).await;
        pool.volume_create(spec("v", 16)).await.unwrap();
        for step in 0..6u64 {
            write(&pool, "v", step << 20, &pattern(step, 0, 3 << 20)).await;
            pool.snapshot_create("v", &format!("v@{step}")).await.unwrap();
        }
        pool.clone_create("v@3", "c").await.unwrap();
        write(&pool, "c", 0, &pattern(77, 0, 1 << 20)).await;
        for name in ["v@2", "v", "v@0", "v@5", "v@3", "c", "v@4", "v@1"] {
            let unique = pool.node(name).await.unwrap().unique.unwrap();
            let before = pool.info().await.unwrap().allocated;
            pool.delete(name).await.unwrap();
            deleted(&pool).await;
            let freed = before - pool.info().await.unwrap().allocated;
            assert_eq!(freed, unique, "{name}");
            assert_sound(&pool).await;
        }
        deleted(&pool).await;
        assert_eq!(pool.info().await.unwrap().allocated, 0);
    });
}

#[test]
fn trim_gives_space_back_also_under_snapshots() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(128)]).await;
        pool.volume_create(spec("v", 16)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 4 << 20)).await;
        let v = pool.open("v").await.unwrap();
        assert_eq!(v.allocated(), 4 << 20);
        v.deallocate(1000 * 512, 4 << 20).await.unwrap();
        assert_eq!(v.allocated(), 4096 * 125);
        assert_eq!(read(&pool, "v", 0, 125 * 4096).await, pattern(1, 0, 125 * 4096));
        assert_eq!(read(&pool, "v", 125 * 4096, 4096).await, vec![0; 4096]);
        write(&pool, "v", 0, &pattern(1, 0, 4 << 20)).await;
        pool.snapshot_create("v", "s").await.unwrap();
        v.deallocate(0, 16 << 20).await.unwrap();
        assert_eq!(v.allocated(), 0);
        assert_eq!(pool.info().await.unwrap().allocated, 4 << 20);
        assert_eq!(read(&pool, "s", 0, 4 << 20).await, pattern(1, 0, 4 << 20));
        assert_eq!(read(&pool, "v", 0, 16 << 20).await, vec![0; 16 << 20]);
        pool.delete("s").await.unwrap();
        deleted(&pool).await;
        assert_eq!(pool.info().await.unwrap().allocated, 0);
        assert_sound(&pool).await;
    });
}

#[test]
fn resize_keeps_what_stays_and_zeroes_what_comes() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(64)]).await;
        pool.volume_create(spec("v", 4)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 4 << 20)).await;
        assert_eq!(pool.resize("v", 2 << 20, false).await.unwrap_err().kind, PoolErrorKind::Invalid);
        pool.resize("v", 2 << 20, true).await.unwrap();
        pool.resize("v", 6 << 20, false).await.unwrap();
        assert_eq!(read(&pool, "v", 0, 2 << 20).await, pattern(1, 0, 2 << 20));
        assert_eq!(read(&pool, "v", 2 << 20, 4 << 20).await, vec![0; 4 << 20]);
        for size in [0, u64::MAX, 1 << 62] {
            assert_eq!(
                pool.resize("v", size, true).await.unwrap_err().kind,
                PoolErrorKind::Invalid,
                "{size}"
            );
        }
        assert_sound(&pool).await;
    });
}

#[test]
fn names_sizes_and_uses_are_checked() {
    run(async {
        let (manager, pool) = pool_on(&[ram(64)]).await;
        let long = "x".repeat(224);
        for name in ["", "-a", "a b", "a/b", "ä", "a\u{1}", &long] {
            let error = pool.volume_create(spec(name, 1)).await.unwrap_err();
            assert_eq!(error.kind, PoolErrorKind::Invalid, "{name}");
        }
        pool.volume_create(spec(&long[1..], 1)).await.unwrap();
        pool.volume_create(spec("v", 1)).await.unwrap();
        assert_eq!(pool.volume_create(spec("v", 1)).await.unwrap_err().kind, PoolErrorKind::Exists);
        let odd = VolumeSpec { block_size: 520, ..spec("w", 1) };
        assert_eq!(pool.volume_create(odd).await.unwrap_err().kind, PoolErrorKind::Invalid);
        assert_eq!(pool.snapshot_create("v", "v").await.unwrap_err().kind, PoolErrorKind::Exists);
        assert_eq!(pool.snapshot_create("nope", "s").await.unwrap_err().kind, PoolErrorKind::NotFound);
        assert_eq!(pool.clone_create("v", "c").await.unwrap_err().kind, PoolErrorKind::Invalid);
        pool.snapshot_create("v", "s").await.unwrap();
        assert_eq!(pool.rollback("s", "s", None).await.unwrap_err().kind, PoolErrorKind::Invalid);
        let open = pool.open("s").await.unwrap();
        assert_eq!(pool.delete("s").await.unwrap_err().kind, PoolErrorKind::Busy);
        assert_eq!(manager.export("p").await.unwrap_err().kind, PoolErrorKind::Busy);
        drop(open);
        pool.delete("s").await.unwrap();
        pool.rename("v", "w").await.unwrap();
        assert_eq!(pool.node("v").await.unwrap_err().kind, PoolErrorKind::NotFound);
        manager.export("p").await.unwrap();
        assert_eq!(pool.info().await.unwrap_err().kind, PoolErrorKind::NotFound);
    });
}

#[test]
fn a_device_that_holds_a_pool_is_not_taken() {
    run(async {
        let devices = [ram(64)];
        let (manager, _pool) = pool_on(&devices).await;
        let error = manager.create("q", devices.to_vec(), PoolOptions::default()).await.unwrap_err();
        assert_eq!(error.kind, PoolErrorKind::Busy);
        manager.export("p").await.unwrap();
        let error = manager.create("q", devices.to_vec(), PoolOptions::default()).await.unwrap_err();
        assert_eq!(error.kind, PoolErrorKind::Exists);
        assert!(error.text.contains("'p'"), "{error}");
        let forced = PoolOptions { force: true, ..PoolOptions::default() };
        manager.create("q", devices.to_vec(), forced).await.unwrap();
        manager.destroy("q").await.unwrap();
        assert_eq!(
            manager.import(devices.to_vec()).await.map(drop).unwrap_err().kind,
            PoolErrorKind::NotFound
        );
        manager.create("r", devices.to_vec(), PoolOptions::default()).await.unwrap();
        let small = Device::open("ram:8MiB", OpenOptions::default()).unwrap();
        let error = manager.create("s", vec![small], PoolOptions::default()).await.map(drop).unwrap_err();
        assert_eq!(error.kind, PoolErrorKind::Invalid);
    });
}

#[test]
fn a_device_that_has_grown_is_used_as_before_and_one_that_has_shrunk_is_refused() {
    run(async {
        let devices = [ram(80)];
        let (manager, pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 16)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 16 << 20)).await;
        let capacity = pool.info().await.unwrap().capacity;
        manager.export("p").await.unwrap();
        let image = devices[0].image().unwrap();
        let resized = |mib: usize| {
            let mut image = image.clone();
            image.resize(mib << 20, 0);
            Device::ram_from_image(&image, 4096).unwrap()
        };
        for mib in [81, 200] {
            let device = resized(mib);
            for _ in 0..2 {
                let manager = super::manager();
                let pool = manager.import(vec![device.clone()]).await.unwrap();
                let info = pool.info().await.unwrap();
                assert_eq!((info.capacity, info.damage), (capacity, Vec::new()), "{mib} MiB");
                assert_eq!(read(&pool, "v", 0, 16 << 20).await, pattern(1, 0, 16 << 20));
                assert_sound(&pool).await;
                manager.export("p").await.unwrap();
            }
            // Nothing was written where the pool is not.
            assert!(device.image().unwrap()[80 << 20..].iter().all(|byte| *byte == 0));
        }
        let short = resized(72);
        let error = manager.import(vec![short.clone()]).await.map(drop).unwrap_err();
        assert_eq!(error.kind, PoolErrorKind::Invalid, "{error}");
        assert_eq!(short.image().unwrap()[..], image[..72 << 20], "nothing was written");
        let error = manager.create("q", vec![short], PoolOptions::default()).await.map(drop).unwrap_err();
        assert_eq!(error.kind, PoolErrorKind::Exists, "{error}");
    });
}

#[test]
fn several_devices_in_any_order_and_never_fewer() {
    run(async {
        let devices = [ram(64), ram(64), ram(80)];
        let (manager, pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 60)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 60 << 20)).await;
        for device in &pool.info().await.unwrap().devices {
            assert_eq!(device.size, 64 << 20);
        }
        manager.export("p").await.unwrap();
        let shuffled = vec![devices[2].clone(), devices[0].clone(), devices[1].clone()];
        assert_eq!(
            manager.import(shuffled[..2].to_vec()).await.map(drop).unwrap_err().kind,
            PoolErrorKind::NotFound
        );
        let twice = [shuffled.clone(), copy_of(&devices[..1])].concat();
        assert_eq!(manager.import(twice).await.map(drop).unwrap_err().kind, PoolErrorKind::Invalid);
        let pool = manager.import(shuffled).await.unwrap();
        assert_eq!(read(&pool, "v", 0, 60 << 20).await, pattern(1, 0, 60 << 20));
        assert_sound(&pool).await;
    });
}

#[test]
fn kept_values_come_back_with_the_pool() {
    run(async {
        let devices = [ram(64)];
        let (manager, pool) = pool_on(&devices).await;
        pool.config_put("subsystem/a", Some(serde_json::json!({"nqn": "x"}))).await.unwrap();
        pool.config_put("subsystem/b", Some(serde_json::json!(2))).await.unwrap();
        pool.config_put("subsystem/b", None).await.unwrap();
        // Enough to go through both halves of the catalog several times.
        for i in 0..600 {
            pool.config_put("other", Some(serde_json::json!([i, "x".repeat(3000)]))).await.unwrap();
        }
        let crashed = copy_of(&devices);
        manager.export("p").await.unwrap();
        drop(pool);
        for devices in [devices.to_vec(), crashed] {
            let manager = super::manager();
            let pool = manager.import(devices).await.unwrap();
            let kept = pool.config_list("subsystem/").await.unwrap();
            assert_eq!(kept, [("subsystem/a".to_owned(), serde_json::json!({"nqn": "x"}))]);
            assert_eq!(pool.config_list("other").await.unwrap()[0].1[0], 599);
        }
    });
}
