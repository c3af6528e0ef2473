//! SPDK's own console client (PyPI's `spdk`, program `spdk-rpc`) drives our socket unchanged.
//!
//! The client is taken from `RIMROCK_SPDK_CLIENT` or found on `PATH`; without it the test is skipped.
#![forbid(unsafe_code)]

mod daemon;
mod skip;

use daemon::{Daemon, free_port};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;

/// The client against one daemon.
struct Spdk<'a> {
    program: PathBuf,
    daemon: &'a Daemon,
}

fn client() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("RIMROCK_SPDK_CLIENT") {
        return Some(path.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join("spdk-rpc")).find(|program| program.is_file())
}

impl Spdk<'_> {
    fn run(&self, arguments: &[&str]) -> (bool, String) {
        let output = Command::new(&self.program)
            .arg("-s")
            .arg(self.daemon.socket())
            .args(arguments)
            .output()
            .expect("the client starts");
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        (output.status.success(), text)
    }

    /// A call that must succeed; gives the JSON it printed, or the bare text, or null when it printed nothing.
    fn ok(&self, arguments: &[&str]) -> Value {
        let (success, text) = self.run(arguments);
        assert!(success, "{arguments:?}: {text}");
        let text = text.trim();
        match serde_json::from_str(text) {
            Ok(value) => value,
            Err(_) if text.is_empty() => Value::Null,
            Err(_) => Value::String(text.to_owned()),
        }
    }

    /// A call that must be refused with this code.
    fn refused(&self, arguments: &[&str], code: i64) {
        let (success, text) = self.run(arguments);
        assert!(!success && text.contains(&code.to_string()), "{arguments:?} must fail with {code}: {text}");
    }
}

fn keys(object: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> =
        object.as_object().unwrap_or_else(|| panic!("{object}")).keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn the_console_client_makes_uses_and_removes_everything() {
    let Some(program) = client() else {
        return skip::skip("spdk-rpc", "install it with `pip install spdk`, or set RIMROCK_SPDK_CLIENT");
    };
    let daemon = Daemon::start();
    let spdk = Spdk { program, daemon: &daemon };
    let image = daemon.path().join("aio.img");
    std::fs::File::create(&image).unwrap().set_len(128 << 20).unwrap();
    let image = image.to_str().unwrap();

    // About the daemon.
    let version = spdk.ok(&["spdk_get_version"]);
    assert_eq!(keys(&version["fields"]), ["commit", "major", "minor", "patch", "suffix"]);
    let methods = spdk.ok(&["rpc_get_methods"]);
    assert!(methods.as_array().unwrap().contains(&json!("bdev_lvol_create")));

    // Devices.
    assert_eq!(spdk.ok(&["bdev_malloc_create", "-b", "Malloc0", "256", "4096"]), "Malloc0");
    assert_eq!(spdk.ok(&["bdev_malloc_create", "16", "512"]), "Malloc1");
    spdk.refused(&["bdev_malloc_create", "-b", "Malloc0", "8", "4096"], -17);
    assert_eq!(spdk.ok(&["bdev_aio_create", image, "aio0", "4096"]), "aio0");
    spdk.ok(&["bdev_aio_delete", "aio0"]);
    assert_eq!(spdk.ok(&["bdev_uring_create", image, "ur0", "4096"]), "ur0");
    let malloc = &spdk.ok(&["bdev_get_bdevs", "-b", "Malloc0"])[0];
    assert_eq!(
        keys(malloc),
        [
            "aliases",
            "assigned_rate_limits",
            "block_size",
            "claimed",
            "driver_specific",
            "name",
            "num_blocks",
            "numa_id",
            "optimal_write_size",
            "preferred_unmap_alignment",
            "preferred_unmap_granularity",
            "preferred_write_alignment",
            "preferred_write_granularity",
            "product_name",
            "supported_io_types",
            "uuid",
            "zoned",
        ]
    );
    assert_eq!((&malloc["block_size"], &malloc["num_blocks"]), (&json!(4096), &json!(65536)));
    spdk.refused(&["bdev_get_bdevs", "-b", "nope"], -19);

    // A store of logical volumes.
    let store = spdk.ok(&["bdev_lvol_create_lvstore", "Malloc0", "lvs0", "-c", "65536"]);
    spdk.refused(&["bdev_lvol_create_lvstore", "Malloc0", "lvs1"], -1);
    let stores = spdk.ok(&["bdev_lvol_get_lvstores", "-l", "lvs0"]);
    assert_eq!(
        keys(&stores[0]),
        [
            "base_bdev",
            "block_size",
            "cluster_size",
            "free_clusters",
            "max_growable_size",
            "name",
            "total_data_clusters",
            "uuid"
        ]
    );
    assert_eq!((&stores[0]["uuid"], &stores[0]["base_bdev"]), (&store, &json!("Malloc0")));
    let free = stores[0]["free_clusters"].as_u64().unwrap() * stores[0]["cluster_size"].as_u64().unwrap();
    assert!(free > 200 << 20 && free <= 256 << 20, "{free}");
    spdk.refused(&["bdev_lvol_get_lvstores", "-l", "zz"], -19);
    assert_eq!(spdk.ok(&["bdev_get_bdevs", "-b", "Malloc0"])[0]["claim_type"], "exclusive_write");

    // Volumes, snapshots, clones.
    let volume = spdk.ok(&["bdev_lvol_create", "-l", "lvs0", "-t", "v0", "64"]);
    assert_eq!(volume.as_str().unwrap().len(), 36);
    spdk.refused(&["bdev_lvol_create", "-l", "lvs0", "-t", "v0", "64"], -17);
    spdk.refused(&["bdev_lvol_create", "-l", "zz", "v1", "1"], -19);
    spdk.refused(&["bdev_lvol_create", "-l", "lvs0", "vx", "999999"], -32602);
    let snapshot = spdk.ok(&["bdev_lvol_snapshot", "lvs0/v0", "s0"]);
    spdk.refused(&["bdev_lvol_snapshot", "lvs0/zz", "s9"], -19);
    let clone = spdk.ok(&["bdev_lvol_clone", "lvs0/s0", "c0"]);
    spdk.refused(&["bdev_lvol_clone", "lvs0/v0", "c9"], -32602);
    spdk.ok(&["bdev_lvol_resize", volume.as_str().unwrap(), "96"]);
    let lvols = spdk.ok(&["bdev_lvol_get_lvols", "-l", "lvs0"]);
    assert_eq!(lvols.as_array().unwrap().len(), 3);
    for lvol in lvols.as_array().unwrap() {
        assert_eq!(
            keys(lvol),
            [
                "alias",
                "is_clone",
                "is_degraded",
                "is_esnap_clone",
                "is_snapshot",
                "is_thin_provisioned",
                "lvs",
                "name",
                "num_allocated_clusters",
                "uuid",
            ]
        );
    }
    for (name, uuid, snapshot, clone) in
        [("v0", &volume, false, true), ("s0", &snapshot, true, false), ("c0", &clone, false, true)]
    {
        let bdev = &spdk.ok(&["bdev_get_bdevs", "-b", &format!("lvs0/{name}")])[0];
        assert_eq!((&bdev["name"], &bdev["aliases"]), (uuid, &json!([format!("lvs0/{name}")])));
        let lvol = &bdev["driver_specific"]["lvol"];
        assert_eq!((&lvol["snapshot"], &lvol["clone"]), (&json!(snapshot), &json!(clone)), "{name}");
        assert_eq!((&lvol["lvol_store_uuid"], &lvol["base_bdev"]), (&store, &json!("Malloc0")));
        assert_eq!(bdev["supported_io_types"]["write"], json!(!snapshot));
        if clone {
            assert_eq!(lvol["base_snapshot"], "s0");
        } else {
            assert_eq!(lvol["clones"].as_array().unwrap().len(), 2);
        }
    }
    assert_eq!(spdk.ok(&["bdev_get_bdevs", "-b", "lvs0/v0"])[0]["num_blocks"], 96 << 8);

    // The target.
    let (nqn, port) = ("nqn.2016-06.io.spdk:cnode1", free_port().to_string());
    spdk.ok(&["nvmf_create_transport", "-t", "TCP", "-i", "131072"]);
    spdk.refused(&["nvmf_create_transport", "-t", "TCP"], -32603);
    spdk.refused(&["nvmf_create_transport", "-t", "FOO"], -32602);
    let transports = spdk.ok(&["nvmf_get_transports"]);
    assert_eq!((&transports[0]["trtype"], &transports[0]["max_io_size"]), (&json!("TCP"), &json!(131_072)));
    spdk.ok(&[
        "nvmf_create_subsystem",
        nqn,
        "-s",
        "SPDK00000000000001",
        "-d",
        "SPDK bdev Controller",
        "-m",
        "32",
        "-r",
    ]);
    spdk.refused(&["nvmf_create_subsystem", nqn], -32603);
    spdk.refused(&["nvmf_create_subsystem", "not-an-nqn"], -32602);
    spdk.ok(&["nvmf_subsystem_add_ns", nqn, "lvs0/v0"]);
    let identity = ["-n", "7", "-g", "ABCDEF0123456789ABCDEF0123456789", "-e", "ABCDEF0123456789"];
    spdk.ok(&[&["nvmf_subsystem_add_ns", nqn, "ur0"][..], &identity].concat());
    spdk.refused(&["nvmf_subsystem_add_ns", nqn, "zz"], -32602);
    spdk.refused(&["nvmf_subsystem_add_ns", "nqn.2016-06.io.spdk:zz", "Malloc1"], -32602);
    let listen = ["-t", "TCP", "-f", "IPv4", "-a", "127.0.0.1", "-s", &port];
    spdk.ok(&[&["nvmf_subsystem_add_listener", nqn][..], &listen].concat());
    spdk.refused(&[&["nvmf_subsystem_add_listener", nqn][..], &listen].concat(), -32602);
    let elsewhere = ["-t", "TCP", "-f", "IPv4", "-a", "203.0.113.9", "-s", &port];
    spdk.refused(&[&["nvmf_subsystem_add_listener", nqn][..], &elsewhere].concat(), -32602);
    let host = "nqn.2016-06.io.spdk:host1";
    spdk.ok(&["nvmf_subsystem_add_host", nqn, host]);
    let listed = spdk.ok(&["nvmf_get_subsystems", nqn]);
    assert_eq!(listed[0]["hosts"], json!([{ "nqn": host }]));
    spdk.ok(&["nvmf_subsystem_remove_host", nqn, host]);
    spdk.refused(&["nvmf_subsystem_remove_host", nqn, host], -32603);
    spdk.ok(&["nvmf_subsystem_allow_any_host", nqn, "--allow-any-host"]);

    let listed = spdk.ok(&["nvmf_get_subsystems"]);
    assert_eq!(keys(&listed[0]), ["allow_any_host", "hosts", "listen_addresses", "nqn", "subtype"]);
    assert_eq!(listed[0]["subtype"], "Discovery");
    let subsystem = &listed[1];
    assert_eq!(
        keys(subsystem),
        [
            "allow_any_host",
            "dmrsl",
            "hosts",
            "listen_addresses",
            "max_cntlid",
            "max_namespaces",
            "min_cntlid",
            "model_number",
            "namespaces",
            "nqn",
            "passthrough",
            "serial_number",
            "subtype",
            "wzsl",
        ]
    );
    let address = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port });
    assert_eq!(subsystem["listen_addresses"], json!([address]));
    assert_eq!((&subsystem["allow_any_host"], &subsystem["max_namespaces"]), (&json!(true), &json!(32)));
    let namespaces = subsystem["namespaces"].as_array().unwrap();
    assert_eq!(keys(&namespaces[0]), ["anagrpid", "bdev_name", "name", "nguid", "nsid", "uuid"]);
    assert_eq!(
        (&namespaces[0]["nsid"], &namespaces[0]["bdev_name"], &namespaces[0]["uuid"]),
        (&json!(1), &volume, &volume)
    );
    assert_eq!((&namespaces[1]["nsid"], &namespaces[1]["eui64"]), (&json!(7), &json!("ABCDEF0123456789")));
    assert_eq!(namespaces[1]["nguid"], "ABCDEF0123456789ABCDEF0123456789");
    assert_eq!(spdk.ok(&["nvmf_subsystem_get_listeners", nqn])[0]["address"], address);
    assert_eq!(spdk.ok(&["nvmf_subsystem_get_controllers", nqn]), json!([]));
    assert_eq!(spdk.ok(&["nvmf_subsystem_get_qpairs", nqn]), json!([]));

    // What is in use is not deleted.
    spdk.refused(&["bdev_uring_delete", "ur0"], -16);
    spdk.refused(&["bdev_malloc_delete", "Malloc0"], -16);

    // And all of it away again.
    spdk.ok(&[&["nvmf_subsystem_remove_listener", nqn][..], &listen].concat());
    spdk.ok(&["nvmf_subsystem_remove_ns", nqn, "1"]);
    spdk.refused(&["nvmf_subsystem_remove_ns", nqn, "9"], -32602);
    spdk.ok(&["nvmf_delete_subsystem", nqn]);
    spdk.refused(&["nvmf_delete_subsystem", nqn], -32602);
    spdk.ok(&["bdev_lvol_delete", clone.as_str().unwrap()]);
    spdk.refused(&["bdev_lvol_delete", "lvs0/zz"], -19);
    spdk.ok(&["bdev_lvol_delete", "lvs0/v0"]);
    spdk.ok(&["bdev_lvol_delete", "lvs0/s0"]);
    spdk.ok(&["bdev_lvol_delete_lvstore", "-l", "lvs0"]);
    spdk.refused(&["bdev_lvol_delete_lvstore", "-l", "lvs0"], -19);
    for (method, name) in [("malloc", "Malloc0"), ("malloc", "Malloc1"), ("uring", "ur0")] {
        spdk.ok(&[&format!("bdev_{method}_delete"), name]);
    }
    assert_eq!(spdk.ok(&["bdev_get_bdevs"]), json!([]));
}

#[test]
fn where_ci_is_true_a_missing_client_is_a_failed_test() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let run = |ci: &str, allowed: &str| {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_console_client_makes_uses_and_removes_everything"])
            .env_remove("RIMROCK_SPDK_CLIENT")
            .envs([("PATH", ""), ("CI", ci), ("RIMROCK_ALLOW_SKIP", allowed)])
            .env("RIMROCK_SKIP_LOG", log.path())
            .output()
            .unwrap()
            .status;
        status.success()
    };
    assert!(!run("true", ""));
    assert!(!run("true", "nvmf_tgt"));
    assert!(run("true", "nvmf_tgt,spdk-rpc"));
    assert!(run("", ""));
    assert_eq!(std::fs::read_to_string(log.path()).unwrap().lines().count(), 2);
}
