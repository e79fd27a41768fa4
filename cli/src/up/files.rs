//! The files of a cluster that `galaxy up` makes, once: `cluster/` in the home has the cluster file, the authority and
//! what the coordinator keeps; beside it are the identities of this machine.

use super::{UpArgs, children::Children};
use crate::{connection::reachable, failure::Failure, join::name_of_machine};
use galaxy_common::{Bytes, DeviceName};
use galaxy_coord::{
    Cluster,
    cluster::{self, DIRECTORY, DeviceConfig},
    registry::Registry,
};
use galaxy_engine::measure::free_memory;
use galaxy_proto::{
    identity::{Authority, Identity, Role},
    join::{Contact, identity_in, local_addresses},
};
use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

/// The name of the coordinator.
pub(super) const COORDINATOR: &str = "coordinator";
/// Days for which the coordinator's identity is valid.
const DAYS: u32 = 3650;
/// The memory that this machine grants where the system does not say what is free.
const MEMORY: Bytes = Bytes(1_000_000_000);
/// The name of this machine, where it has none.
const NAMELESS: &str = "first";

/// The paths of the files of a cluster.
pub(super) struct Files {
    home: PathBuf,
    /// The directory of the cluster.
    pub(super) cluster: PathBuf,
    model: PathBuf,
}

impl Files {
    /// Makes the files that are not there yet.
    pub(super) fn prepare(home: &Path, args: &UpArgs) -> Result<Self, Failure> {
        let cluster = home.join("cluster");
        let model = args.model.canonicalize().map_err(|error| {
            Failure::new(format!("there is no model in {}: {error}", args.model.display()))
                .todo("`galaxy pull` brings one")
        })?;
        let files = Self { home: home.to_owned(), cluster, model };
        if !files.cluster.exists() && identity_in(home, Role::Device).exists() {
            return Err(Failure::new("this machine has joined a cluster already").todo(format!(
                "set GALAXY_HOME to another directory than {} to start one of its own",
                home.display()
            )));
        }
        files.make(args)?;
        Ok(files)
    }

    fn make(&self, args: &UpArgs) -> Result<(), Failure> {
        let keys = self.cluster.join("keys");
        let failed = |error: &dyn ToString| Failure::new(error.to_string());
        fs::create_dir_all(&self.cluster).map_err(|e| failed(&e))?;
        if !keys.join("ca").exists() {
            Authority::create(&keys, "home").map_err(|e| failed(&e))?;
        }
        let authority = Authority::open(&keys).map_err(|e| failed(&e))?;
        let coordinator = DeviceName::new(COORDINATOR).map_err(|e| failed(&e))?;
        if !keys.join(COORDINATOR).exists() {
            let issued = authority.issue(&coordinator, Role::Coordinator, DAYS);
            issued.map_err(|e| failed(&e))?;
        }
        let name = args.name.clone().or_else(name_of_machine).filter(|name| *name != coordinator);
        let name = name.map_or_else(|| DeviceName::new(NAMELESS).map_err(|e| failed(&e)), Ok)?;
        self.write_cluster_file(args)?;
        // A device that is there keeps the name that it has.
        if !identity_in(&self.home, Role::Device).exists() {
            self.write_device(&name, args).map_err(|e| failed(&e))?;
        }
        self.enrol(&name, &coordinator, args.listen)
    }

    /// Issues the identities of this machine, by the authority that is here; those that are there get the coordinator's
    /// address.
    fn enrol(
        &self,
        name: &DeviceName,
        coordinator: &DeviceName,
        listen: SocketAddr,
    ) -> Result<(), Failure> {
        let failed = |error: &dyn ToString| Failure::new(error.to_string());
        let file = self.cluster_file();
        let cluster = Cluster::open(&file).map_err(|error| failed(&error).at(file.display()))?;
        let identity = Identity::load(&cluster.identity).map_err(|e| failed(&e))?;
        let registry = Registry::open(&file, &cluster, &identity).map_err(|e| failed(&e))?;
        let addresses = vec![self.reachable(listen)];
        let contact = Contact { name: coordinator.clone(), addresses };
        for (role, suffix) in
            [(Role::Device, ""), (Role::Client, "-client"), (Role::Admin, "-admin")]
        {
            let into = identity_in(&self.home, role);
            if into.exists() {
                // The coordinator may listen elsewhere now.
                contact.save(&into).map_err(|e| failed(&e))?;
                continue;
            }
            let name =
                DeviceName::new(format!("{}{suffix}", short(name))).map_err(|e| failed(&e))?;
            registry.enrol(&name, role, &into, &contact).map_err(|e| failed(&e))?;
        }
        Ok(())
    }

    /// The address at which this machine reaches the coordinator.
    pub(super) fn reachable(&self, listen: SocketAddr) -> String {
        reachable(&listen.to_string())
    }

    fn cluster_file(&self) -> PathBuf {
        self.cluster.join("cluster.toml")
    }

    /// Writes the cluster file, or changes its `model` and `listen`, and its `weights_format` if that is asked for.
    fn write_cluster_file(&self, args: &UpArgs) -> Result<(), Failure> {
        let path = self.cluster_file();
        let failed = |e: std::io::Error| Failure::new(e.to_string()).at(path.display());
        let model = self.model.display().to_string();
        // A literal string of TOML has no escapes.
        if model.contains(|c: char| c == '\'' || c.is_control()) {
            return Err(Failure::new(format!("the path {model:?} cannot stand in a cluster file"))
                .todo("move the model to a directory without quotes in its name"));
        }
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => format!(
                "# Made by `galaxy up`, which changes `model` and `listen`, and `weights_format` if it is told to; the rest is\n\
                 # yours. Devices that joined are in {DIRECTORY}/. docs/cluster-file.md says what else may stand here.\n\
                 [cluster]\nname = \"home\"\nidentity = \"keys/{COORDINATOR}\"\nauthority = \"keys\"\n"
            ),
            Err(error) => return Err(failed(error)),
        };
        let mut text = with_line(&text, "model", &format!("'{model}'"));
        text = with_line(&text, "listen", &format!("\"{}\"", args.listen));
        if let Some(bits) = args.weights_format {
            text = with_line(&text, "weights_format", &format!("\"{bits}\""));
        }
        fs::write(&path, text).map_err(failed)
    }

    fn write_device(&self, name: &DeviceName, args: &UpArgs) -> std::io::Result<()> {
        let free = free_memory().map(DeviceConfig::granted);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let at = |ip: IpAddr| SocketAddr::new(ip, args.worker_port).to_string();
        let device = DeviceConfig {
            name: name.clone(),
            address: at(Ipv4Addr::LOCALHOST.into()),
            addresses: local_addresses().into_iter().map(at).collect(),
            memory: args.memory.or(free).filter(|memory| memory.0 > 0).unwrap_or(MEMORY),
            threads: Some(args.threads.unwrap_or(u16::try_from(cores).unwrap_or(u16::MAX))),
            share: None,
        };
        cluster::write(&self.cluster.join(DIRECTORY), &device)
    }

    /// Starts coordinator and worker.
    pub(super) fn start(&self, args: &UpArgs, children: &mut Children) -> Result<(), Failure> {
        let (file, audit) = (self.cluster_file(), self.cluster.join("audit.jsonl"));
        children.start(
            "galaxy-coord",
            &["--cluster".as_ref(), file.as_ref(), "--audit".as_ref(), audit.as_ref()],
        )?;
        let (identity, cache) = (identity_in(&self.home, Role::Device), self.home.join("cache"));
        let listen = format!("0.0.0.0:{}", args.worker_port);
        children.start(
            "galaxy-worker",
            &[
                "--identity".as_ref(),
                identity.as_ref(),
                "--cache".as_ref(),
                cache.as_ref(),
                "--models".as_ref(),
                self.model.as_ref(),
                "--listen".as_ref(),
                listen.as_ref(),
            ],
        )
    }
}

/// A name, cut so that a suffix fits behind it.
fn short(name: &DeviceName) -> String {
    name.as_str().chars().take(40).collect::<String>().trim_end_matches('-').to_owned()
}

/// A cluster file with this value of a key of `[cluster]`: in its line, or one below the title.
fn with_line(text: &str, key: &str, value: &str) -> String {
    let is = |line: &&str| {
        line.trim_start().strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with('='))
    };
    let (wanted, there) = (format!("{key} = {value}\n"), text.lines().any(|line| is(&line)));
    let line = |line: &str| match line {
        _ if is(&line) => wanted.clone(),
        _ if !there && line.trim() == "[cluster]" => format!("{line}\n{wanted}"),
        _ => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_model::Quantisation;

    fn args(model: &Path) -> UpArgs {
        UpArgs {
            model: model.to_owned(),
            weights_format: None,
            name: Some(DeviceName::new("nuc").unwrap()),
            listen: "0.0.0.0:7000".parse().unwrap(),
            worker_port: 7100,
            memory: Some(Bytes(2_000_000_000)),
            threads: Some(2),
            uses: 2,
        }
    }

    #[test]
    fn identities_are_kept_and_the_cluster_file_follows_the_arguments() {
        let dir = tempfile::tempdir().unwrap();
        let (home, one, two) =
            (dir.path().join("home"), dir.path().join("one"), dir.path().join("two"));
        fs::create_dir_all(&one).unwrap();
        fs::create_dir_all(&two).unwrap();
        let files = Files::prepare(&home, &args(&one)).unwrap();
        let open = || Cluster::open(&files.cluster_file()).unwrap();
        let cluster = open();
        assert_eq!(cluster.model, one.canonicalize().unwrap());
        let device = &cluster.devices[0];
        assert_eq!((device.name.as_str(), device.address.as_str()), ("nuc", "127.0.0.1:7100"));
        let load = |role| Identity::load(&identity_in(&home, role)).unwrap();
        let names =
            [Role::Device, Role::Client, Role::Admin].map(|role| load(role).name().to_string());
        assert_eq!(names, ["nuc", "nuc-client", "nuc-admin"]);
        let contact = Contact::load(&identity_in(&home, Role::Client)).unwrap().unwrap();
        assert_eq!(contact.addresses, ["127.0.0.1:7000"]);

        let key = fs::read(home.join("device/key.pem")).unwrap();
        assert_eq!(cluster.weights_format, None);
        let later = UpArgs {
            listen: "0.0.0.0:7001".parse().unwrap(),
            weights_format: Some(Quantisation::Q8),
            ..args(&two)
        };
        Files::prepare(&home, &later).unwrap();
        assert_eq!(
            (open().model, open().listen.as_str()),
            (two.canonicalize().unwrap(), "0.0.0.0:7001")
        );
        assert_eq!(open().weights_format, Some(Quantisation::Q8));
        Files::prepare(&home, &args(&two)).unwrap();
        assert_eq!(open().weights_format, Some(Quantisation::Q8), "what the file says stays");
        assert_eq!(fs::read(home.join("device/key.pem")).unwrap(), key, "identities stay");
    }

    #[test]
    fn a_machine_that_joined_starts_no_cluster() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(identity_in(dir.path(), Role::Device)).unwrap();
        let refused = Files::prepare(dir.path(), &args(dir.path())).err().unwrap().to_string();
        assert!(refused.contains("joined a cluster already"), "{refused}");
    }
}
