//! A view of a model: another model in this process, whose versions a thread makes of those of the first one.

mod apart;

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use libmodelio::bytes::region::Region;
use libmodelio::client::Event;
use libmodelio::transport::local::Shard as _;
use libmodelio::view::{self, Flat, Source, ViewPlan};
use libmodelio::vocabulary::strided::Strided;
use ps_backend::server::view::ViewShard;

use super::error::{CallError, CallResult};
use super::model::{Model, OWN_LEARNER, Snapshots};
use super::written_view::WrittenView;
pub(super) use apart::explained as not_sent;

/// How often a version is looked for that nobody has told of, or for which there was no room.
const LOOKS: Duration = Duration::from_secs(1);

/// Makes the versions of a view until it is dropped.
pub struct ViewMaker {
    wake: SyncSender<()>,
}

impl ViewMaker {
    /// There may be a new version.
    pub fn wake(&self) {
        // One request is as good as many.
        let _ = self.wake.try_send(());
    }

    /// Begins a view of `source`. Waits until its first version is made, at most [`Model::timeout`].
    ///
    /// # Errors
    /// ETIMEDOUT, ENOMEM, and what keeps `source` from being read.
    pub fn start(source: &Arc<Model>, name: &str, plan: ViewPlan) -> CallResult<(Arc<Model>, ViewMaker)> {
        let (name, deadline) = (format!("{}/views/{name}", source.name), Instant::now() + source.timeout());
        ViewMaker::begin(source, name, plan, Some(deadline), None)
    }

    /// A view in place of `source`, which it keeps. Waits as long as the shards send something.
    ///
    /// # Errors
    /// Those of [`Self::start`].
    pub fn in_place_of(source: Arc<Model>, plan: ViewPlan) -> CallResult<Arc<Model>> {
        let (name, keeps) = (source.name.clone(), Some(Arc::clone(&source)));
        let (model, maker) = ViewMaker::begin(&source, name, plan, None, keeps)?;
        let of_view = Arc::downgrade(&model);
        source.job.subscribe(Box::new(move |event| match event {
            // The readers of the view are those of the model.
            Event::Readers | Event::Restored => {
                of_view.upgrade().iter().for_each(|view| view.job.tell(event));
            }
            Event::Durable => {}
            Event::Published(_) | Event::Left(..) => maker.wake(),
        }));
        Ok(model)
    }

    fn begin(
        source: &Arc<Model>,
        name: String,
        plan: ViewPlan,
        deadline: Option<Instant>,
        keeps: Option<Arc<Model>>,
    ) -> CallResult<(Arc<Model>, ViewMaker)> {
        let view = ViewShard::new(plan.layout());
        loop {
            match make(&view, view.take_buffer()?, &plan, source, deadline) {
                // A newer version has taken its place.
                Err(error)
                    if error.errno == libc::ESTALE && deadline.is_none_or(|at| Instant::now() < at) => {}
                outcome => break outcome?,
            }
        }
        let failed = |error: &dyn std::fmt::Display| CallError::new(libc::EIO, error.to_string());
        let job = view.job(&source.name, source.job.generation()).map_err(|error| failed(&error))?;
        let plan = Arc::new(plan);
        let written = || plan.share().map(|_| Arc::new(WrittenView::new(&source.job, &plan)));
        let snapshots = match &keeps {
            Some(whole) => Snapshots::PartOf(Arc::clone(whole)),
            None => Snapshots::Never(written()),
        };
        let mut model = Model::new(name, job, source.metadata.clone(), OWN_LEARNER.to_owned(), snapshots);
        model.companions = source.companions.clone();
        model.own_refusal = Arc::clone(&source.own_refusal);
        let model = Arc::new(model);
        let (wake, woken) = mpsc::sync_channel(1);
        let ends = (Arc::downgrade(source), Arc::downgrade(&model));
        let follow = move || {
            // Whoever looks at the view alone keeps the model by it.
            let (_keeps, mut said) = (keeps, None);
            while woken.recv_timeout(LOOKS) != Err(RecvTimeoutError::Disconnected) {
                let (Some(source), Some(model)) = (ends.0.upgrade(), ends.1.upgrade()) else { return };
                let outcome = follow(&view, &plan, &source, &model);
                let outcome = outcome.inspect_err(|error| model.own_refusal.explain(error));
                let why = outcome.err().map(|error| error.to_string());
                if why.is_some() && why != said {
                    tracing::warn!(
                        model = model.name,
                        "no new version: {}",
                        why.as_deref().unwrap_or_default()
                    );
                }
                said = why;
            }
        };
        std::thread::Builder::new()
            .name("gradfs-view".into())
            .spawn(follow)
            .map_err(|error| failed(&error))?;
        let maker = ViewMaker { wake };
        maker.wake();
        Ok((model, maker))
    }
}

/// Makes the newest version, if the view does not have it.
fn follow(view: &ViewShard, plan: &ViewPlan, source: &Arc<Model>, model: &Model) -> CallResult<()> {
    if source.job.offered_version() <= model.job.version() {
        return Ok(());
    }
    match make(view, model.job.allocate()?, plan, source, None) {
        // A newer version has taken its place, and is said to be there.
        Err(error) if error.errno == libc::ESTALE => Ok(()),
        outcome => outcome,
    }
}

/// A version that is held, read until a deadline.
struct Held<'a>(Flat<'a>, Option<Instant>);

impl Source for Held<'_> {
    type Error = CallError;

    fn read(&mut self, pieces: &[Strided], out: &mut [u8]) -> CallResult<()> {
        if self.1.is_some_and(|deadline| Instant::now() >= deadline) {
            let what = "the view was not made in time (control/timeout)";
            return Err(CallError::new(libc::ETIMEDOUT, what));
        }
        let Ok(()) = self.0.read(pieces, out);
        Ok(())
    }
}

/// Makes the newest version. It is read here, or from its shards if the model is not here.
fn make(
    view: &ViewShard,
    buffer: Region,
    plan: &ViewPlan,
    source: &Arc<Model>,
    deadline: Option<Instant>,
) -> CallResult<()> {
    let job = &source.job;
    let about = |version| (version, job.controls(), job.meta(version));
    if !job.holds_versions() {
        let (version, patience) = (job.version(), source.timeout());
        let until = move || deadline.unwrap_or_else(|| Instant::now() + patience);
        return view.make(buffer, about(version), |before, out| {
            let before = before.filter(|_| job.controls().delta);
            apart::fill(job, (version, before), plan, out, &until)
        });
    }
    let reader = source.open_newest()?;
    // Versions are pulled in time for who opens them.
    job.version_opened(None);
    let mut held = Held(Flat(reader.bytes(0..source.layout.size())), deadline);
    view.make(buffer, about(reader.version()), |_, out| view::fill(plan, &mut held, out))
}
