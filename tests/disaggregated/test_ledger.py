"""Random jobs hold the ledger to its promises: see `World.check` and the methods of `World`."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.disaggregated.world import Recipe, World

RECIPES = st.builds(
    Recipe,
    prompts_per_step=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    at_bound=st.sampled_from(["wait", "wait", "drop"]),
)
WORKERS = st.integers(0, 2)
PLACES = st.integers(0, 10**6)


class Jobs(RuleBasedStateMachine):
    world: World

    @initialize(recipe=RECIPES)
    def begin(self, recipe):
        self.world = World(recipe)
        self.world.join(0)

    @rule(number=WORKERS)
    def join(self, number):
        self.world.join(number)

    @rule(number=WORKERS, reports=st.booleans())
    def lose(self, number, reports):
        if reports and number in self.world.workers:
            for place in range(len(self.world.workers[number].work)):
                self.world.report(number, place)
        self.world.lose(number)

    @rule(count=st.integers(0, 6))
    def draw(self, count):
        self.world.draw(count)

    @precondition(lambda self: self.world.workers)
    @rule(place=PLACES, most=st.integers(1, 8), newest=st.booleans(), starts_late=st.booleans())
    def lease(self, place, most, newest, starts_late):
        numbers = sorted(self.world.workers)
        number = numbers[place % len(numbers)]
        if newest:
            self.world.push(number)
        version = self.world.workers[number].version
        self.world.draw(self.world.ledger.num_to_draw(version, most))
        self.world.lease(number, most, starts_late=starts_late)

    @precondition(lambda self: self._busy())
    @rule(places=st.lists(PLACES, min_size=1, max_size=5))
    def finish(self, places):
        for place in places:
            if self._busy():
                self.world.finish(*self._work(place))

    @precondition(lambda self: self._busy())
    @rule(place=PLACES)
    def report(self, place):
        self.world.report(*self._work(place))

    @precondition(lambda self: self._busy())
    @rule(place=PLACES)
    def end_without_a_group(self, place):
        self.world.drop(*self._work(place))

    @precondition(lambda self: self.world.ended)
    @rule(place=PLACES)
    def finish_ended(self, place):
        self.world.finish_ended(place % len(self.world.ended))

    @precondition(lambda self: not self.world.is_training)
    @rule()
    def take(self):
        self.world.take()

    @precondition(lambda self: self.world.is_training)
    @rule()
    def update(self):
        self.world.update()

    @rule(num_steps=st.integers(1, 3), generates=st.booleans())
    def do_steps(self, num_steps, generates):
        """The trainer takes and updates; one worker may generate for it, and others are slow."""
        for _ in range(num_steps):
            if self.world.is_training or self.world.take():
                self.world.update()
            if self.world.workers and generates:
                self.lease(0, 3, True, False)
                number = min(self.world.workers)
                for _ in self.world.workers[number].work[-2:]:
                    self.world.finish(number, -1)

    @precondition(lambda self: not self.world.is_training)
    @rule()
    def save(self):
        self.world.save()

    @precondition(lambda self: self.world.saved)
    @rule(place=PLACES, keep_partials=st.booleans())
    def load(self, place, keep_partials):
        self.world.load(place % len(self.world.saved), keep_partials=keep_partials)
        self.world.join(0)

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()

    @rule(all_die=st.booleans())
    def goes_on(self, all_die):
        self.world.check_goes_on(all_die=all_die)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.check_goes_on(all_die=False)
            self.world.check_goes_on(all_die=True)

    def _busy(self):
        return [(n, i) for n, w in self.world.workers.items() for i in range(len(w.work))]

    def _work(self, place):
        busy = self._busy()
        return busy[place % len(busy)]


class JobsWithNewRecipes(Jobs):
    """A run may be resumed with another bound, batch size or policy."""

    @precondition(lambda self: self.world.saved)
    @rule(place=PLACES, recipe=RECIPES)
    def load_with_a_new_recipe(self, place, recipe):
        place %= len(self.world.saved)
        self.world.load(place, keep_partials=True, recipe=recipe)


def run(machine, max_examples, num_steps):
    case = machine.TestCase
    case.settings = settings(max_examples=max_examples, stateful_step_count=num_steps)
    case().runTest()


def test_random_jobs():
    run(Jobs, 80, 50)


def test_random_jobs_that_change_their_recipe():
    run(JobsWithNewRecipes, 30, 40)


@pytest.mark.release
@pytest.mark.parametrize("machine", [Jobs, JobsWithNewRecipes])
def test_many_random_jobs(machine):
    run(machine, 500, 80)
