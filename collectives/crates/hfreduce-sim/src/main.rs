//! `hfreduce-sim`: simulated clusters on the command line.

use std::io::Write;
use std::process::ExitCode;

use hfreduce_plan::{NodePlace, Plan};
use hfreduce_sim::cluster::{Settings, allreduce};
use hfreduce_sim::figure7;
use hfreduce_sim::hardware::Hardware;

const USAGE: &str = "\
hfreduce-sim: simulate the collective engine on a cluster

  hfreduce-sim figure7 [-o FILE.svg] [--json FILE.json] [--nodes N,N,…]
      print a table of 186 MiB over the paper's nodes; optionally write the chart and the numbers
  hfreduce-sim allreduce --zones N,N,… --size BYTES [--hardware KIND] [--slot-bytes BYTES]
      simulate one allreduce over N nodes in each zone
      KIND: fire-flyer-2, fire-flyer-2-nvlink, or ethernet-1g (the default), ethernet-10g, …
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut stdout = std::io::stdout().lock();
    match run(&args).map(|text| stdout.write_all(text.as_bytes())) {
        Ok(_) => ExitCode::SUCCESS,
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "hfreduce-sim: {why}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &[String]) -> Result<String, String> {
    let Some((verb, options)) = args.split_first() else { return Ok(USAGE.into()) };
    match verb.as_str() {
        "figure7" => draw_figure7(&Options::read(options, &["-o", "--json", "--nodes"])?),
        "allreduce" => one_allreduce(&Options::read(
            options,
            &["--zones", "--size", "--hardware", "--slot-bytes"],
        )?),
        "help" | "--help" | "-h" => Ok(USAGE.into()),
        other => Err(format!("unknown command `{other}`: expected figure7, allreduce or help")),
    }
}

/// Pairs of option and value.
struct Options(Vec<(String, String)>);

impl Options {
    fn read(args: &[String], known_options: &[&str]) -> Result<Self, String> {
        let mut read = Vec::new();
        let mut args = args.iter();
        while let Some(name) = args.next() {
            if !known_options.contains(&name.as_str()) {
                return Err(format!(
                    "unknown option `{name}`: expected {}",
                    known_options.join(", ")
                ));
            }
            let value = args.next().ok_or_else(|| format!("`{name}` needs a value"))?;
            read.push((name.clone(), value.clone()));
        }
        Ok(Self(read))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().rev().find(|(option, _)| option == name).map(|(_, value)| value.as_str())
    }

    fn number(&self, name: &str) -> Result<Option<u64>, String> {
        let wrong =
            |value: &str| format!("invalid value `{name} {value}`: expected an integer above 0");
        self.get(name)
            .map(|value| {
                value.parse().ok().filter(|number| *number > 0).ok_or_else(|| wrong(value))
            })
            .transpose()
    }

    fn numbers(&self, name: &str) -> Result<Option<Vec<usize>>, String> {
        let wrong = |value: &str| {
            format!(
                "invalid value `{name} {value}`: expected integers from 1 to 10,000, separated by commas"
            )
        };
        let number = |text: &str| text.parse().ok().filter(|number| (1..=10_000).contains(number));
        self.get(name)
            .map(|value| {
                value.split(',').map(number).collect::<Option<_>>().ok_or_else(|| wrong(value))
            })
            .transpose()
    }
}

fn write(path: &str, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("cannot write `{path}`: {error}"))
}

fn draw_figure7(options: &Options) -> Result<String, String> {
    let nodes = options.numbers("--nodes")?.unwrap_or_else(|| figure7::NODES.to_vec());
    let settings = Settings::default();
    let points = figure7::points(&nodes, settings).map_err(|error| error.to_string())?;
    if let Some(path) = options.get("-o") {
        write(path, &figure7::picture(&points))?;
    }
    if let Some(path) = options.get("--json") {
        write(path, &format!("{:#}\n", figure7::json(&points, settings)))?;
    }
    Ok(figure7::table(&points))
}

fn hardware(kind: &str) -> Result<Hardware, String> {
    let ethernet = |kind: &str| -> Option<f64> {
        let gigabits: f64 = kind.strip_prefix("ethernet-")?.strip_suffix('g')?.parse().ok()?;
        (gigabits > 0.0).then_some(gigabits * 1e9)
    };
    match kind {
        "fire-flyer-2" => Ok(Hardware::FIRE_FLYER_2),
        "fire-flyer-2-nvlink" => Ok(Hardware::FIRE_FLYER_2_NVLINK),
        _ => ethernet(kind).map(Hardware::ethernet).ok_or_else(|| {
            format!(
                "unknown hardware `{kind}`: expected fire-flyer-2, fire-flyer-2-nvlink, ethernet-1g"
            )
        }),
    }
}

fn one_allreduce(options: &Options) -> Result<String, String> {
    let zones = options
        .numbers("--zones")?
        .ok_or("`--zones` is required: numbers of nodes, for example --zones 4,4")?;
    let size = options
        .number("--size")?
        .ok_or("`--size` is required: a number of bytes, for example --size 16777216")?;
    let hardware = hardware(options.get("--hardware").unwrap_or("ethernet-1g"))?;
    let mut settings = Settings::default();
    if let Some(bytes) = options.number("--slot-bytes")? {
        settings.slot_bytes = bytes as usize;
    }
    let places: Vec<NodePlace> = zones
        .iter()
        .enumerate()
        .flat_map(|(zone, count)| (0..*count).map(move |node| (zone, node)))
        .map(|(zone, node)| NodePlace::new(format!("z{zone}n{node}"), format!("zone-{zone}")))
        .collect();
    let plan = Plan::new(&places).map_err(|error| error.to_string())?;
    let outcome =
        allreduce(&plan, &hardware, settings, &[size]).map_err(|error| error.to_string())?;
    let rate = outcome.algorithm_rate(size);
    let mut text = format!(
        "{} nodes, {size} bytes: {:.3} ms, {:.3} GB/s, {:.1} % of the limit of twice the size over each card\n",
        places.len(),
        outcome.seconds * 1e3,
        rate / 1e9,
        rate / (hardware.network_rate / 2.0) * 100.0
    );
    for (from, to, bytes) in &outcome.zone_bytes {
        text += &format!(
            "  {from} to {to}: {bytes:.0} bytes, {:.4} of the size\n",
            bytes / size as f64
        );
    }
    for (name, share) in outcome.busiest.iter().take(3) {
        text += &format!("  {name}: busy {:.0} % of the time\n", share * 100.0);
    }
    Ok(text)
}
